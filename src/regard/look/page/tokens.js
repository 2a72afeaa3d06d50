// The text as tokens: choose one, and the others are shaded by what it gives them or gets from them.
const CHIPS = 240;
const lists = { tokens: { start: 0, table: null, followed: -1 }, keys: { start: 0, table: null, followed: -1 } };

const windowOf = (name, table, chosen) => {
  const list = lists[name];
  if (list.table !== table) Object.assign(list, { table, start: 0 });
  const away = chosen < list.start || chosen >= list.start + CHIPS;
  if (chosen >= 0 && chosen !== list.followed && away) list.start = chosen - Math.floor(CHIPS / 2);
  list.followed = chosen;
  list.start = within(list.start, 0, Math.max(0, table.length - CHIPS));
  return list;
};
const drawChips = (name, table, chosen) => {
  const list = windowOf(name, table, chosen);
  const end = Math.min(table.length, list.start + CHIPS);
  const group = find(name);
  const key = `${record.tables.indexOf(table)}:${list.start}`;
  if (group.dataset.shows !== key) {
    group.dataset.shows = key;
    group.dir = table.dir;
    group.replaceChildren(...Array.from({ length: end - list.start }, (_, place) => {
      const index = list.start + place;
      const chip = make("span", { textContent: table.name(index), id: `${name}-${index}`, className: table.special(index) ? "special" : "", dir: "auto" });
      chip.setAttribute("role", "option");
      return chip;
    }));
  }
  const part = name === "tokens" ? "token" : "key";
  find(`${part}-pages`).hidden = table.length <= CHIPS;
  find(`${name}-span`).textContent = `${list.start}–${end - 1} of ${table.length}`;
  find(`${name}-back`).disabled = list.start === 0;
  find(`${name}-on`).disabled = end === table.length;
  return [...group.children].map((chip, place) => [chip, list.start + place]);
};
const markChips = (name, chips, chosen, share) => {
  let active = null;
  for (const [chip, index] of chips) {
    chip.setAttribute("aria-selected", String(index === chosen));
    if (index === chosen) active = chip;
    if (share) shade(chip, share(index));
    else chip.removeAttribute("style");
  }
  const group = find(name);
  if (!active) { group.removeAttribute("aria-activedescendant"); return; }
  group.setAttribute("aria-activedescendant", active.id);
  const above = active.offsetTop - group.scrollTop;
  if (above < 0 || above + active.offsetHeight > group.clientHeight) group.scrollTop = active.offsetTop - group.clientHeight / 2;
};
const sideOf = (name) => (name === "keys" ? "key" : across() ? "query" : state.side);

const drawTokens = () => {
  const looks = state.side === "query";
  find("tokens-title").textContent = across() ? "The tokens that look" : "The tokens";
  find("keys-part").hidden = !across();
  const value = looks ? rowOf(state.token) : columnOf(state.token);
  const empty = (looks ? queries() : keys()).length === 0;
  const share = empty || bare() ? null : (index) => value.at(index);
  const chosen = (name) => (sideOf(name) === state.side ? state.token : -1);
  const shaded = (name) => (!across() || sideOf(name) !== state.side ? share : null);
  markChips("tokens", drawChips("tokens", queries(), chosen("tokens")), chosen("tokens"), shaded("tokens"));
  if (across()) markChips("keys", drawChips("keys", keys(), chosen("keys")), chosen("keys"), shaded("keys"));
  else find("keys").replaceChildren();
  if (!across()) delete find("keys").dataset.shows;
  find("side").value = state.side;
  find("side-part").hidden = across();
  drawTables(empty);
};

const barRow = (name, share, most, table, index, pick) => {
  const bar = make("div", { className: share < 0 ? "bar less" : "bar" });
  bar.style.width = `${most > 0 ? (100 * Math.abs(share)) / most : 0}%`;
  const button = make("button", { type: "button", textContent: name, dir: "auto" });
  button.title = `token ${index}`;
  button.addEventListener("click", pick);
  return make("tr", {}, [make("td", {}, [button]), make("td", { textContent: text(share) }), make("td", {}, [bar])]);
};
const drawTable = (id, caption, list, table, side) => {
  const node = find(id);
  node.hidden = list === null;
  if (list === null) return;
  node.caption.textContent = caption;
  const most = record.signed ? Math.max(...list.map(([, share]) => Math.abs(share)), 0) : 1;
  node.tBodies[0].replaceChildren(...list.map(([index, share]) => barRow(table.told(index), share, most, table, index, () => choose({ side, token: index, key: -1 }))));
};
const drawTables = (empty) => {
  const looks = state.side === "query";
  const name = (looks ? queries() : keys()).told;
  const clear = (list) => list.filter(([, share], place) => place === 0 || Math.abs(share) >= 0.0005);
  const none = empty || bare();
  const row = !none && (looks || !across()) ? rowOf(state.token) : null;
  const column = !none && (!looks || !across()) ? clear(columnOf(state.token).list(8)) : null;
  drawTable("attends", row ? `${name(state.token)} attends to` : "", row && clear(row.list(8)), keys(), across() ? "key" : state.side);
  drawTable("attended", column ? `${name(state.token)} is attended to by` : "", column, queries(), "query");
  find("mass").textContent = row && apart().size > 0 && !record.signed ? massSaid(row) : "";
  sayBest();
};
const massSaid = (row) => {
  const share = `${(100 * row.removed).toFixed(1)}%`;
  const least = shown.whole || shown.rows.has(state.token) ? "" : "at least ";
  if (!state.apart) return `${least}${share} of this token's weight is on ${keys().words}.`;
  return `${least}${share} of this token's weight was on ${keys().words}; what is left is shown as the whole.`;
};

const say = (query, key) => {
  if (queries().length === 0 || keys().length === 0 || bare()) return;
  const row = rowOf(query);
  const share = row.exact(key);
  const shownShare = share === null ? `in a block of ${text(coarse(query, key) ?? 0)}` : text(row.at(key));
  const isolate = (words) => make("bdi", { textContent: words });
  find("said").replaceChildren(isolate(queries().told(query)), " → ", isolate(keys().told(key)), `: ${shownShare}`);
};
const sayBest = () => {
  if (queries().length === 0 || keys().length === 0) { find("said").textContent = "There are no tokens here."; return; }
  if (bare()) { find("said").textContent = "Only the numbers of this head are in this page."; return; }
  if (state.side === "query") {
    const [best] = state.key >= 0 ? [[state.key]] : rowOf(state.token).list(1);
    if (best) say(state.token, best[0]);
    else find("said").textContent = `${queries().told(state.token)} attends to nothing.`;
    return;
  }
  const [best] = columnOf(state.token).list(1);
  if (best) say(best[0], state.token);
};

// What a token that is pointed at does itself, beside what the chosen one has to do with it.
const sayOwn = (name, index) => {
  if (bare()) return;
  const table = name === "keys" ? keys() : queries();
  const [looks] = name === "tokens" ? rowOf(index).list(1) : [];
  const [seen] = name === "keys" || !across() ? columnOf(index).list(1) : [];
  const parts = [];
  if (looks) parts.push(["attends most to ", keys().told(looks[0]), ` (${text(looks[1])})`]);
  if (seen) parts.push(["is attended to most by ", queries().told(seen[0]), ` (${text(seen[1])})`]);
  if (parts.length === 0) return;
  const words = parts.flatMap(([before, other, after], place) => [place > 0 ? " and " : " ", before, make("bdi", { textContent: other }), after]);
  const first = find("said").childNodes.length > 0 ? ". " : "";
  find("said").append(first, make("bdi", { textContent: table.told(index) }), ...words);
};

const bindChips = (name) => {
  const group = find(name);
  const pick = (index, key = -1) => choose({ side: sideOf(name), token: index, key });
  const indexOf = (chip) => Number(chip.id.slice(name.length + 1));
  group.addEventListener("click", (event) => {
    const chip = event.target.closest("[role=option]");
    if (chip) pick(indexOf(chip));
  });
  group.addEventListener("mouseover", (event) => {
    const chip = event.target.closest("[role=option]");
    if (!chip) return;
    const index = indexOf(chip);
    if (across() && sideOf(name) === state.side) find("said").replaceChildren();
    else if (state.side === "query") say(state.token, index);
    else say(index, state.token);
    sayOwn(name, index);
  });
  group.addEventListener("mouseleave", sayBest);
  group.addEventListener("keydown", (event) => {
    const last = lists[name].table.length - 1;
    const from = sideOf(name) === state.side ? state.token : 0;
    const turned = group.dir === "rtl" ? -1 : 1;
    const steps = { ArrowDown: 1, ArrowUp: -1, ArrowRight: turned, ArrowLeft: -turned };
    const goal = event.key === "Home" ? 0 : event.key === "End" ? last : steps[event.key] ? from + steps[event.key] : null;
    if (goal === null || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    pick(within(goal, 0, last));
  });
  const turn = (by) => () => { lists[name].start += by; drawTokens(); };
  find(`${name}-back`).addEventListener("click", turn(-CHIPS));
  find(`${name}-on`).addEventListener("click", turn(CHIPS));
};
