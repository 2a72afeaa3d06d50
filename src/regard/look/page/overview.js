// All heads as small maps on one canvas, and the catalogue: the same heads as a table that can be sorted.
const EDGE = 30;
const GAP = 4;
// The height that all layers share, and the least that a map takes of it; more layers than fit are scrolled to.
const TALL = 520;
const LEAST = 15;
let cells = [];
let thumbs = null;
const overview = { size: 0, wide: 0 };

const readThumbs = async () => {
  const codes = new Uint8Array(await inflate(record.thumbs));
  thumbs = [];
  let place = 0;
  for (const one of record.sites) {
    const [rows, columns] = one.thumb;
    thumbs.push(one.heads.map(() => {
      const values = Float32Array.from(codes.subarray(place, place + rows * columns), (code) => eighths[code]);
      place += rows * columns;
      return values;
    }));
  }
};

const drawOverview = () => {
  const canvas = find("heads");
  const most = Math.max(1, ...record.sites.map((one) => one.heads.length));
  const room = canvas.parentElement.clientWidth - EDGE;
  const share = Math.floor(TALL / record.sites.length) - GAP;
  const size = within(Math.min(Math.floor(room / most) - GAP, share), LEAST, 72);
  Object.assign(overview, { size, wide: most });
  const pen = sized(canvas, EDGE + most * (size + GAP), 18 + record.sites.length * (size + GAP) + 3);
  pen.font = `11px ${family}`;
  pen.fillStyle = style("--soft");
  pen.textAlign = "center";
  const step = size < 22 ? 2 : 1;
  for (let head = 0; head < most; head += step) pen.fillText(String(head), EDGE + head * (size + GAP) + size / 2, 11);
  pen.textAlign = "right";
  cells = [];
  record.sites.forEach((one, layer) => {
    const top = 18 + layer * (size + GAP);
    pen.fillStyle = style("--soft");
    pen.fillText(one.label, EDGE - 7, top + size / 2 + 4);
    one.heads.forEach((head, number) => drawThumb(pen, layer, number, EDGE + number * (size + GAP), top));
  });
};
const drawThumb = (pen, layer, number, left, top) => {
  const { size } = overview;
  const [rows, columns] = record.sites[layer].thumb;
  pen.fillStyle = style("--panel");
  pen.fillRect(left, top, size, size);
  if (rows * columns > 0 && record.sites[layer].heads[number].drawn) pen.drawImage(bitmap(thumbs[layer][number], columns, 0, rows, 0, columns), left, top, size, size);
  pen.strokeStyle = style("--line");
  pen.lineWidth = 1;
  pen.strokeRect(left - 0.5, top - 0.5, size + 1, size + 1);
  if (layer === state.layer && number === state.head) {
    pen.strokeStyle = style("--mark");
    pen.lineWidth = 3;
    pen.strokeRect(left - 1.5, top - 1.5, size + 3, size + 3);
  }
  cells.push({ layer, number, left, top });
};
const cellAt = (event) => {
  const box = find("heads").getBoundingClientRect();
  const [x, y] = [event.clientX - box.left, event.clientY - box.top];
  return cells.find((cell) => x >= cell.left && x < cell.left + overview.size && y >= cell.top && y < cell.top + overview.size);
};
const headName = (layer, number) => `${record.sites[layer].title}, head ${number}`;

const bindOverview = () => {
  const canvas = find("heads");
  canvas.addEventListener("click", (event) => {
    const cell = cellAt(event);
    if (cell) choose({ layer: cell.layer, head: cell.number });
  });
  canvas.addEventListener("mousemove", (event) => {
    const cell = cellAt(event);
    canvas.title = cell ? `${headName(cell.layer, cell.number)}: ${record.sites[cell.layer].heads[cell.number].said}` : "";
    canvas.style.cursor = cell ? "pointer" : "default";
  });
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] }[event.key];
    if (!step) return;
    event.preventDefault();
    const layer = within(state.layer + step[0], 0, record.sites.length - 1);
    choose({ layer, head: within(state.head + step[1], 0, record.sites[layer].heads.length - 1) });
  });
};

const PAGE = 40;
const catalogue = { order: record.sorted, up: record.sorted < 0, kind: "", start: 0, rows: [] };
const entries = record.sites.flatMap((one, layer) => one.heads.map((head, number) => ({ layer, number, head })));

const sortCatalogue = () => {
  const { order, up, kind } = catalogue;
  const value = (entry) => (order < 0 ? entry.layer * 1e6 + entry.number : entry.head.cells[order]);
  const rows = entries.filter((entry) => kind === "" || entry.head.cells[0] === kind);
  const compare = (a, b) => (typeof a === "string" || typeof b === "string" ? String(a).localeCompare(String(b)) : (a ?? -1) - (b ?? -1));
  rows.sort((a, b) => compare(value(a), value(b)) * (up ? 1 : -1));
  catalogue.rows = rows;
};
const shownCell = (value, form) => {
  if (value === null) return "–";
  if (form === "words") return value;
  return form === "share" ? `${(100 * value).toFixed(0)}%` : value.toFixed(form === "fine" ? 3 : 1);
};
const drawCatalogue = () => {
  const table = find("catalogue");
  const titles = [{ title: "head", hint: "layer and head" }, ...record.columns];
  table.tHead.replaceChildren(make("tr", {}, titles.map((column, place) => {
    const sorted = place - 1 === catalogue.order;
    const button = make("button", { type: "button", textContent: column.title, title: column.hint });
    button.addEventListener("click", () => {
      const down = place > 0 && typeof entries[0]?.head.cells[place - 1] !== "string";
      Object.assign(catalogue, { order: place - 1, up: sorted ? !catalogue.up : !down, start: 0 });
      sortCatalogue();
      drawCatalogue();
      find("catalogue").tHead.querySelectorAll("button")[place].focus();
    });
    const cell = make("th", { scope: "col" }, [button]);
    cell.setAttribute("aria-sort", sorted ? (catalogue.up ? "ascending" : "descending") : "none");
    return cell;
  })));
  const rows = catalogue.rows.slice(catalogue.start, catalogue.start + PAGE);
  table.tBodies[0].replaceChildren(...rows.map(catalogueRow));
  const end = Math.min(catalogue.start + PAGE, catalogue.rows.length);
  find("catalogue-count").textContent = `${catalogue.rows.length === 0 ? 0 : catalogue.start + 1}–${end} of ${catalogue.rows.length} heads`;
  find("catalogue-pages").hidden = catalogue.rows.length <= PAGE;
  find("catalogue-back").disabled = catalogue.start === 0;
  find("catalogue-on").disabled = end === catalogue.rows.length;
};
const catalogueRow = ({ layer, number, head }) => {
  const button = make("button", { type: "button", textContent: `${record.sites[layer].label}.${number}`, title: `${headName(layer, number)}: ${head.said}` });
  button.setAttribute("aria-label", headName(layer, number));
  button.addEventListener("click", () => choose({ layer, head: number }));
  const row = make("tr", {}, [
    make("th", { scope: "row" }, [button]),
    ...head.cells.map((value, place) => make("td", { className: record.columns[place].form, textContent: shownCell(value, record.columns[place].form) })),
  ]);
  row.dataset.head = `${layer}.${number}`;
  row.classList.toggle("chosen", layer === state.layer && number === state.head);
  return row;
};
const markCatalogue = () => {
  for (const row of find("catalogue").tBodies[0].rows) row.classList.toggle("chosen", row.dataset.head === `${state.layer}.${state.head}`);
};
const bindCatalogue = () => {
  const kinds = [...new Set(entries.map((entry) => entry.head.cells[0]))].sort();
  find("kind").append(make("option", { value: "", textContent: "all kinds" }), ...kinds.map((kind) => make("option", { value: kind, textContent: kind })));
  find("kind").addEventListener("change", (event) => {
    Object.assign(catalogue, { kind: event.target.value, start: 0 });
    sortCatalogue();
    drawCatalogue();
  });
  const turn = (by) => () => { catalogue.start += by; drawCatalogue(); };
  find("catalogue-back").addEventListener("click", turn(-PAGE));
  find("catalogue-on").addEventListener("click", turn(PAGE));
  sortCatalogue();
  drawCatalogue();
};
