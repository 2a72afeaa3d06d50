// Attention over an image: its patches as a grid over the picture, lit by their weight.
const picture = { pixels: new Map(), cell: 0, table: null, side: "key" };

const pictureSide = () => {
  if (keys().grid) return "key";
  return queries().grid ? "query" : null;
};
const pixelsOf = async (table) => {
  const { image } = table.grid;
  if (!image) return null;
  if (!picture.pixels.has(table)) {
    const colours = new Uint8Array(await inflate(image.chunk));
    const canvas = make("canvas", { width: image.width, height: image.height });
    const data = new ImageData(image.width, image.height);
    for (let from = 0, to = 0; to < data.data.length; from += 3, to += 4) data.data.set([colours[from], colours[from + 1], colours[from + 2], 255], to);
    canvas.getContext("2d").putImageData(data, 0, 0);
    picture.pixels.set(table, canvas);
  }
  return picture.pixels.get(table);
};
// Which weights the patches show: those of the chosen token, or, where a patch is chosen, those of the other patches.
const patchShares = () => {
  const { first, rows, columns } = picture.table.grid;
  const looks = state.side === "query";
  const value = looks ? rowOf(state.token) : columnOf(state.token);
  const other = looks ? keys() : queries();
  if (other !== picture.table) return null;
  return Float32Array.from({ length: rows * columns }, (_, patch) => Math.abs(value.at(first + patch)));
};
const drawPicture = async () => {
  const side = pictureSide();
  find("picture-part").hidden = side === null;
  if (side === null) return;
  const table = (side === "key" ? keys() : queries());
  Object.assign(picture, { table, side });
  const { rows, columns, first } = table.grid;
  const cell = Math.max(4, Math.floor(within(find("picture-part").clientWidth, 140, 340) / Math.max(rows, columns)));
  picture.cell = cell;
  const pen = sized(find("picture"), columns * cell, rows * cell);
  const pixels_ = await pixelsOf(table);
  const shares = patchShares();
  const most = shares ? Math.max(...shares, 1e-9) : 1;
  if (pixels_) pen.drawImage(pixels_, 0, 0, columns * cell, rows * cell);
  for (let patch = 0; patch < rows * columns; patch += 1) {
    const [left, top] = [(patch % columns) * cell, Math.floor(patch / columns) * cell];
    const lit = shares ? Math.sqrt(shares[patch] / most) : 1;
    pen.fillStyle = pixels_ ? `rgb(8 10 14 / ${0.8 * (1 - lit)})` : `rgb(${colour(shares ? shares[patch] / most : 0).join(" ")})`;
    pen.fillRect(left, top, cell, cell);
  }
  const own = state.token - first;
  if ((state.side === "query" ? queries() : keys()) === table && own >= 0 && own < rows * columns) {
    pen.strokeStyle = style("--mark");
    pen.lineWidth = 2;
    pen.strokeRect((own % columns) * cell + 1, Math.floor(own / columns) * cell + 1, cell - 2, cell - 2);
  }
  const [name] = [(state.side === "query" ? queries() : keys()).name(state.token)];
  const sum = shares ? shares.reduce((total, share) => total + share, 0) : 0;
  find("picture-hint").textContent = shares ? `Lit by weight from ${name}: the brightest patch has ${most.toFixed(3)}, all patches together ${sum.toFixed(2)}. Click a patch to start from it.` : "Click a patch to start from it.";
};
const bindPicture = () => {
  const canvas = find("picture");
  const patchAt = (event) => {
    const box = canvas.getBoundingClientRect();
    const { rows, columns, first } = picture.table.grid;
    return first + within(Math.floor((event.clientY - box.top) / picture.cell), 0, rows - 1) * columns + within(Math.floor((event.clientX - box.left) / picture.cell), 0, columns - 1);
  };
  const sideFor = () => (keys() === queries() ? state.side : picture.side);
  canvas.addEventListener("click", (event) => choose({ side: sideFor(), token: patchAt(event), key: -1 }));
  canvas.addEventListener("mousemove", (event) => {
    if (state.side === "query" && picture.table === keys()) say(state.token, patchAt(event));
    else if (state.side === "key" && picture.table === queries()) say(patchAt(event), state.token);
  });
  canvas.addEventListener("mouseleave", sayBest);
  canvas.addEventListener("keydown", (event) => {
    const { rows, columns, first } = picture.table.grid;
    const step = { ArrowDown: columns, ArrowUp: -columns, ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const from = within(state.token, first, first + rows * columns - 1);
    choose({ side: sideFor(), token: within(from + (state.token === from ? step : 0), first, first + rows * columns - 1), key: -1 });
  });
};
