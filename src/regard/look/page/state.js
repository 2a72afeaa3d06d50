// What is looked at. It stands in the address, so that a link to one finding works, also from a file.
const state = { layer: record.opened[0], head: record.opened[1], token: record.opened[2], side: "query", key: -1, apart: false, pool: "max", zoom: 0, row: 0, column: 0 };
let shown = null;
const site = () => record.sites[state.layer];
const queries = () => record.tables[site().queries];
const keys = () => record.tables[site().keys];
// A head of which the page has its numbers alone.
const bare = () => shown.levels.length === 0 && !shown.top;

const fit = () => {
  state.layer = within(state.layer, 0, record.sites.length - 1);
  state.head = within(state.head, 0, Math.max(0, site().heads.length - 1));
  const side = state.side === "query" ? queries() : keys();
  state.token = within(state.token, 0, Math.max(0, side.length - 1));
  if (state.key >= keys().length) state.key = -1;
};

// The notebook's frame has no address of its own.
const addressed = location.protocol !== "about:";
const writeAddress = () => {
  if (!addressed) return;
  const parts = new URLSearchParams({ layer: state.layer, head: state.head, token: state.token });
  if (state.side === "key") parts.set("side", "key");
  if (state.apart) parts.set("apart", "1");
  if (state.pool === "mean") parts.set("pool", "mean");
  if (state.zoom > 0) parts.set("zoom", [state.zoom, Math.round(state.row), Math.round(state.column)].join("."));
  history.replaceState(null, "", `#${parts}`);
};
const readAddress = () => {
  const parts = new URLSearchParams(location.hash.slice(1));
  const number = (name) => (/^\d{1,7}$/.test(parts.get(name) ?? "") ? Number(parts.get(name)) : state[name]);
  const [zoom, row, column] = [0, 1, 2].map((place) => Number((parts.get("zoom") ?? "").split(".")[place]) || 0);
  return {
    layer: number("layer"), head: number("head"), token: number("token"),
    side: parts.get("side") === "key" ? "key" : "query", apart: parts.get("apart") === "1",
    pool: parts.get("pool") === "mean" ? "mean" : "max", zoom: within(Math.round(zoom), 0, 12), row, column,
  };
};

// The keys that can be set apart: special tokens, else the first token, on which many heads of one text rest.
const nothing = new Set();
const across = () => site().cross;
const apart = () => (keys().marked || !across() ? keys().apart : nothing);

// Weights of the chosen head. `listed` are [index, weight], the largest first; exact numbers stand in for coarse ones.
const removed = (row) => {
  let share = 0;
  apart().forEach((key) => { share += row.exact(key) ?? 0; });
  return share;
};
const topEntries = (query) => {
  const found = new Map();
  const { top } = shown;
  for (let place = query * top?.k; top && place < (query + 1) * top.k; place += 1) {
    if (top.weights[place] !== 0) found.set(top.keys[place], top.weights[place]);
  }
  return found;
};
const coarse = (query, key) => {
  if (shown.levels.length === 0) return null;
  const level = shown.levels[0];
  if (shown.whole) return level.max[query * level.columns + key];
  return level[state.pool][Math.floor(query / level.tall) * level.columns + Math.floor(key / level.wide)];
};
const rowOf = (query) => {
  const top = topEntries(query);
  const kept = shown.rows.get(query);
  const exact = (key) => (kept ? kept[key] : top.has(key) ? top.get(key) : shown.whole ? coarse(query, key) : null);
  const row = { exact, removed: 0, scale: 1 };
  row.removed = removed(row);
  if (state.apart) row.scale = row.removed < 0.99999 ? 1 / (1 - row.removed) : 0;
  const out = (key) => state.apart && apart().has(key);
  row.at = (key) => (out(key) ? 0 : (exact(key) ?? coarse(query, key) ?? 0) * row.scale);
  row.list = (count) => {
    const every = shown.whole || kept ? Array.from({ length: keys().length }, (_, key) => key) : [...top.keys()];
    const found = every.filter((key) => !out(key)).map((key) => [key, exact(key) * row.scale]);
    return found.sort((a, b) => Math.abs(b[1]) - Math.abs(a[1])).slice(0, count);
  };
  return row;
};
const columnOf = (key) => {
  const values = new Map();
  const { top } = shown;
  const out = state.apart && apart().has(key);
  if (shown.whole) for (let query = 0; query < queries().length; query += 1) values.set(query, coarse(query, key));
  if (top) for (let place = 0; place < top.keys.length; place += 1) if (top.keys[place] === key && top.weights[place] !== 0) values.set(Math.floor(place / top.k), top.weights[place]);
  if (state.apart) values.forEach((share, query) => values.set(query, out ? 0 : share * rowOf(query).scale));
  return {
    at: (query) => values.get(query) ?? coarse(query, key) ?? 0,
    list: (count) => [...values].sort((a, b) => Math.abs(b[1]) - Math.abs(a[1])).slice(0, count),
  };
};
