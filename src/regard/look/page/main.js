// The one way in: every control changes the state through `choose`, and what depends on the change is drawn again.
const fill = (select, options, chosen) => select.replaceChildren(...options.map(([value, name]) => make("option", { value: String(value), textContent: name, selected: value === chosen })));

const drawControls = () => {
  fill(find("layer"), record.sites.map((one, layer) => [layer, one.option]), state.layer);
  fill(find("head"), site().heads.map((_, head) => [head, String(head)]), state.head);
  find("pool").value = state.pool;
  find("pool-part").hidden = shown.whole && Math.max(queries().length, keys().length) <= 256;
  find("apart-part").hidden = apart().size === 0 || Boolean(record.signed);
  find("apart").checked = state.apart;
  find("apart-words").textContent = `Set ${keys().words} apart`;
};
const drawHead = () => {
  const head = site().heads[state.head];
  find("head-title").replaceChildren(`${headName(state.layer, state.head)}: `, make("bdi", { textContent: head ? head.said : "" }));
  find("head-facts").textContent = site().facts;
  drawControls();
  markCatalogue();
};
const announce = (headChanged) => {
  find("live").textContent = `${headChanged ? `${find("head-title").textContent}. ` : ""}${find("said").textContent}`;
};
const drawScale = () => {
  const values = Float32Array.from({ length: 160 }, (_, place) => {
    const size = record.signed ? (2 * place) / 159 - 1 : place / 159;
    return Math.sign(size) * size ** 2;
  });
  const canvas = find("scale");
  canvas.width = 160;
  canvas.getContext("2d").drawImage(bitmap(values, 160, 0, 1, 0, 160), 0, 0);
  find("scale-low").textContent = record.signed ? "−1" : "0";
};

let turn = 0;
const choose = async (change) => {
  const before = { ...state };
  Object.assign(state, change);
  if (state.layer !== before.layer) Object.assign(state, { zoom: change.zoom ?? 0, row: change.row ?? 0, column: change.column ?? 0, key: change.key ?? -1 });
  fit();
  turn += 1;
  const mine = turn;
  const moved = !shown || state.layer !== before.layer || state.head !== before.head;
  const found = await headOf(state.layer, state.head);
  if (mine !== turn) return;
  const headChanged = moved || shown !== found;
  shown = found;
  if (headChanged) { drawHead(); drawOverview(); drawNeedles(); } else drawControls();
  drawMap();
  drawTokens();
  await drawPicture();
  announce(headChanged);
  writeAddress();
};
const drawAll = () => {
  pixels = pixelTable();
  drawScale();
  drawOverview();
  drawMap();
  drawTokens();
  drawPicture();
};

const bindControls = () => {
  find("layer").addEventListener("change", (event) => choose({ layer: Number(event.target.value) }));
  find("head").addEventListener("change", (event) => choose({ head: Number(event.target.value) }));
  find("pool").addEventListener("change", (event) => choose({ pool: event.target.value }));
  find("apart").addEventListener("change", (event) => choose({ apart: event.target.checked }));
  find("side").addEventListener("change", (event) => choose({ side: event.target.value }));
  find("closer").addEventListener("click", () => zoomTo(state.zoom + 1));
  find("farther").addEventListener("click", () => zoomTo(state.zoom - 1));
  find("search").addEventListener("keydown", (event) => { if (event.key === "Enter") search(event.target.value); });
  window.addEventListener("hashchange", () => choose(readAddress()));
  window.addEventListener("resize", drawAll);
  for (const wanted of [dark, matchMedia("(forced-colors: active)")]) wanted.addEventListener("change", drawAll);
};
const search = (words) => {
  const table = state.side === "query" ? queries() : keys();
  const wanted = words.trim().toLocaleLowerCase();
  for (let step = 1; wanted && step <= table.length; step += 1) {
    const index = (state.token + step) % table.length;
    if (table.name(index).toLocaleLowerCase().includes(wanted)) { choose({ token: index, key: -1 }); return; }
  }
  if (wanted) find("said").textContent = `There is no token with “${words.trim()}” here.`;
};

if (record.signed) document.querySelectorAll(".measure").forEach((node) => { node.textContent = "change"; });
bindOverview();
bindCatalogue();
for (const name of ["tokens", "keys"]) bindChips(name);
bindControls();
bindSaves();
bindNeedles();
bindPicture();
await readThumbs();
await choose(location.hash.length > 1 ? readAddress() : {});
drawScale();
performance.mark("ready");
document.body.dataset.ready = "true";
