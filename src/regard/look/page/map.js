// One head in full: the map, its zoom, and the names of its rows and columns where there is room for them.
const NAMED = 9;
const view = { rows: 0, columns: 0, row: 0, column: 0, down: 1, across: 1, canvas: null };

const apartLevel = () => {
  const [level] = shown.levels;
  const max = new Float32Array(level.max);
  const out = [...apart()];
  for (let query = 0; query < level.rows; query += 1) {
    const { scale } = rowOf(query);
    const start = query * level.columns;
    for (let place = start; place < start + level.columns; place += 1) max[place] *= scale;
    for (const key of out) max[start + key] = 0;
  }
  return { levels: [{ ...level, max, mean: max }] };
};
const pictured = () => {
  if (!state.apart || !shown.whole) return shown;
  shown.apart ??= apartLevel();
  return shown.apart;
};

const LABEL = 116;
const placeView = () => {
  const [rows, columns] = [queries().length, keys().length];
  view.rows = Math.ceil(rows / 2 ** state.zoom);
  view.columns = Math.ceil(columns / 2 ** state.zoom);
  view.row = within(Math.round(state.row), 0, rows - view.rows);
  view.column = within(Math.round(state.column), 0, columns - view.columns);
  const room = find("map").parentElement.clientWidth - 4;
  const cell = (width) => Math.min(40, within(width, 160, 560) / Math.max(1, view.rows, view.columns));
  const size = Math.min(room, 560);
  view.across = view.down = cell(room - LABEL) >= NAMED ? cell(room - LABEL) : Math.min(cell(room), NAMED - 0.01);
  // Sides of very different lengths: the short one is stretched, so that it can be seen.
  if (view.columns * 6 < view.rows) view.across = Math.max(view.across, Math.min(30, size / 6 / view.columns));
  if (view.rows * 6 < view.columns) view.down = Math.max(view.down, Math.min(30, size / 6 / view.rows));
};
const blit = (pen, width, height) => {
  const source = pictured();
  if (source.levels.length === 0) return;
  const base = source.levels[0];
  let number = 0;
  const ratio = window.devicePixelRatio || 1;
  const { tall, wide } = base;
  while (view.rows / tall / 2 ** number > height * ratio || view.columns / wide / 2 ** number > width * ratio) number += 1;
  const level = levelOf(source, number);
  const [rowScale, columnScale] = [1 / tall / 2 ** number, 1 / wide / 2 ** number];
  const [row0, row1] = [Math.floor(view.row * rowScale), Math.min(level.rows, Math.ceil((view.row + view.rows) * rowScale))];
  const [column0, column1] = [Math.floor(view.column * columnScale), Math.min(level.columns, Math.ceil((view.column + view.columns) * columnScale))];
  const picture = bitmap(level[state.pool], level.columns, row0, row1, column0, column1);
  if (picture.width === 0 || picture.height === 0) return;
  const [left, top] = [(column0 / columnScale - view.column) * view.across, (row0 / rowScale - view.row) * view.down];
  pen.drawImage(picture, left, top, (picture.width / columnScale) * view.across, (picture.height / rowScale) * view.down);
};
const drawMarks = (pen, width, height) => {
  pen.strokeStyle = style("--mark");
  pen.lineWidth = 1.5;
  const row = state.side === "query" ? state.token : -1;
  const column = state.side === "key" ? state.token : state.key;
  if (row >= view.row && row < view.row + view.rows) pen.strokeRect(0.75, (row - view.row) * view.down, width - 1.5, Math.max(1, view.down));
  if (column >= view.column && column < view.column + view.columns) pen.strokeRect((column - view.column) * view.across, 0.75, Math.max(1, view.across), height - 1.5);
};
const labels = (table, start, count, size, name, chosen) => {
  const spans = Array.from({ length: count }, (_, place) => {
    const span = make("span", { textContent: table.name(start + place), title: table.name(start + place), dir: "auto" });
    span.style[name === "row-labels" ? "height" : "width"] = `${size}px`;
    span.classList.toggle("chosen", start + place === chosen);
    return span;
  });
  const group = make("div", { className: `${name} labels` }, spans);
  group.style.fontSize = `${Math.min(12, size - 1)}px`;
  group.setAttribute("aria-hidden", "true");
  return group;
};
const drawMap = () => {
  placeView();
  const canvas = view.canvas ?? make("canvas", { tabIndex: 0, id: "weights" });
  if (!view.canvas) bindMap(canvas);
  view.canvas = canvas;
  const [width, height] = [view.columns * view.across, view.rows * view.down];
  const pen = sized(canvas, Math.max(1, width), Math.max(1, height));
  blit(pen, width, height);
  drawMarks(pen, width, height);
  const named = (size) => size >= NAMED;
  const rows = named(view.down) ? labels(queries(), view.row, view.rows, view.down, "row-labels", state.side === "query" ? state.token : -1) : "";
  const columns = named(view.across) ? labels(keys(), view.column, view.columns, view.across, "column-labels", state.side === "key" ? state.token : state.key) : "";
  const held = document.activeElement === canvas;
  find("map").replaceChildren(make("span"), columns || make("span"), rows || make("span"), canvas);
  if (held) canvas.focus();
  find("closer").disabled = view.rows <= 8 && view.columns <= 8;
  find("farther").disabled = state.zoom === 0;
  drawMapHint();
};
const drawMapHint = () => {
  const parts = [`Colour follows the square root of the ${record.signed ? "change" : "weight"}.`];
  if (shown.levels.length === 0) parts.push(bare() ? "" : "The map of this head is not in this page: the lists are.");
  else if (!shown.whole) parts.push(`${queries().length} x ${keys().length} weights are pooled to ${shown.levels[0].rows} x ${shown.levels[0].columns} blocks.`);
  else if (queries().length > 560 || keys().length > 560) parts.push("Cells share a pixel until you zoom in.");
  if (state.apart && !shown.whole) parts.push(`The blocks still hold ${keys().words}; the lists do not.`);
  find("map-hint").textContent = parts.join(" ");
};
const zoomTo = (zoom) => {
  const [rows, columns] = [queries().length, keys().length];
  const query = state.side === "query" ? state.token : view.row + view.rows / 2;
  const key = state.side === "key" ? state.token : state.key >= 0 ? state.key : Math.min(query * (columns / rows), columns);
  choose({ zoom: within(zoom, 0, 12), row: query - rows / 2 ** zoom / 2, column: key - columns / 2 ** zoom / 2 });
};
const bindMap = (canvas) => {
  canvas.setAttribute("role", "application");
  canvas.setAttribute("aria-label", "The weights of this head: arrows up and down choose who looks, left and right at what, plus and minus zoom");
  const at = (event) => {
    const box = canvas.getBoundingClientRect();
    const place = (offset, size, start, count) => start + within(Math.floor(offset / size), 0, count - 1);
    return [place(event.clientY - box.top, view.down, view.row, view.rows), place(event.clientX - box.left, view.across, view.column, view.columns)];
  };
  let grip = null;
  canvas.addEventListener("mousemove", (event) => {
    if (!grip) { say(...at(event)); return; }
    const [row, column] = [grip.row - (event.clientY - grip.y) / view.down, grip.column - (event.clientX - grip.x) / view.across];
    if (Math.abs(event.clientY - grip.y) + Math.abs(event.clientX - grip.x) > 4) grip.moved = true;
    if (grip.moved && state.zoom > 0) choose({ row, column });
  });
  canvas.addEventListener("mouseleave", () => { grip = null; sayBest(); });
  canvas.addEventListener("mousedown", (event) => { grip = { x: event.clientX, y: event.clientY, row: view.row, column: view.column, moved: false }; });
  canvas.addEventListener("mouseup", (event) => {
    const moved = grip?.moved && state.zoom > 0;
    grip = null;
    const [token, key] = at(event);
    if (!moved) choose({ side: "query", token, key });
  });
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const moves = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] };
    if (event.key === "+" || event.key === "=") zoomTo(state.zoom + 1);
    else if (event.key === "-") zoomTo(state.zoom - 1);
    else if (moves[event.key]) walkMap(...moves[event.key]);
    else return;
    event.preventDefault();
  });
};
const walkMap = (down, across) => {
  const token = within((state.side === "query" ? state.token : 0) + down, 0, Math.max(0, queries().length - 1));
  const key = across === 0 ? state.key : within(state.key < 0 ? (across > 0 ? 0 : keys().length - 1) : state.key + across, 0, keys().length - 1);
  const change = { side: "query", token, key };
  if (token < view.row || token >= view.row + view.rows) change.row = token - view.rows / 2;
  if (key >= 0 && (key < view.column || key >= view.column + view.columns)) change.column = key - view.columns / 2;
  choose(change);
};
