// What is on the screen as a file: the map with its names as SVG or PNG, its weights as CSV.
const download = (name, parts, type) => {
  const link = make("a", { href: URL.createObjectURL(new Blob(parts, { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
};
const fileName = (ending) => `attention-${state.layer}-${state.head}.${ending}`;
const escaped = (words) => words.replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);

// One drawing for both kinds of picture: where each part goes, in pixels.
const layout = () => {
  const named = Math.max(view.rows, view.columns) <= 64;
  const cell = named ? 22 : Math.max(1, Math.min(4, Math.floor(900 / Math.max(view.rows, view.columns))));
  const [left, top] = named ? [120, 150] : [20, 50];
  return { named, cell, left, top, width: left + view.columns * cell + 20, height: top + view.rows * cell + 20, title: find("head-title").textContent };
};
const flat = () => {
  const { cell } = layout();
  const canvas = make("canvas", { width: Math.max(1, view.columns * cell), height: Math.max(1, view.rows * cell) });
  const pen = canvas.getContext("2d");
  pen.imageSmoothingEnabled = false;
  const { across: wide, down: tall } = view;
  Object.assign(view, { across: cell, down: cell });
  blit(pen, canvas.width, canvas.height);
  Object.assign(view, { across: wide, down: tall });
  return canvas;
};
const rowNames = () => Array.from({ length: view.rows }, (_, place) => queries().name(view.row + place));
const columnNames = () => Array.from({ length: view.columns }, (_, place) => keys().name(view.column + place));
const svg = () => {
  const { named, cell, left, top, width, height, title } = layout();
  const middle = cell / 2 + 4;
  const rows = named ? rowNames().map((name, place) => `<text x="${left - 6}" y="${top + place * cell + middle}" text-anchor="end">${escaped(name)}</text>`) : [];
  const columns = named ? columnNames().map((name, place) => `<text transform="translate(${left + place * cell + middle},${top - 6}) rotate(-90)">${escaped(name)}</text>`) : [];
  return `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" font-family="sans-serif" font-size="12" fill="${style("--ink")}">
<rect width="100%" height="100%" fill="${style("--ground")}"/>
<text x="20" y="24" font-size="14" font-weight="bold">${escaped(title)}</text>
<image x="${left}" y="${top}" width="${view.columns * cell}" height="${view.rows * cell}" href="${flat().toDataURL("image/png")}"/>
${[...rows, ...columns].join("\n")}
</svg>\n`;
};
const png = () => {
  const { named, cell, left, top, width, height, title } = layout();
  const canvas = make("canvas", { width: width * 2, height: height * 2 });
  const pen = canvas.getContext("2d");
  pen.scale(2, 2);
  pen.imageSmoothingEnabled = false;
  pen.fillStyle = style("--ground");
  pen.fillRect(0, 0, width, height);
  pen.fillStyle = style("--ink");
  pen.font = `bold 14px ${family}`;
  pen.fillText(title, 20, 24);
  pen.drawImage(flat(), left, top);
  pen.font = `12px ${family}`;
  pen.textAlign = "right";
  if (named) rowNames().forEach((name, place) => pen.fillText(name, left - 6, top + place * cell + cell / 2 + 4, left - 12));
  pen.textAlign = "left";
  if (named) columnNames().forEach((name, place) => {
    pen.save();
    pen.translate(left + place * cell + cell / 2 + 4, top - 6);
    pen.rotate(-Math.PI / 2);
    pen.fillText(name, 0, 0, 110);
    pen.restore();
  });
  return new Promise((done) => { canvas.toBlob(done, "image/png"); });
};
// A cell that a spreadsheet would run as a formula is kept as text.
const field = (value) => (typeof value === "number" ? String(value) : `"${(/^[=+\-@\t\r]/.test(value) ? `'${value}` : value).replaceAll('"', '""')}"`);
const csv = () => {
  const lines = [["query", "query token", "key", "key token", "weight"].map(field).join(",")];
  for (let query = view.row; query < view.row + view.rows; query += 1) {
    const row = rowOf(query);
    for (const [key, share] of row.list(Infinity)) {
      if (key >= view.column && key < view.column + view.columns && share !== 0) lines.push([query, queries().name(query), key, keys().name(key), Number(share.toPrecision(6))].map(field).join(","));
    }
  }
  return `${lines.join("\r\n")}\r\n`;
};
const bindSaves = () => {
  find("save-svg").addEventListener("click", () => download(fileName("svg"), [svg()], "image/svg+xml"));
  find("save-png").addEventListener("click", async () => download(fileName("png"), [await png()], "image/png"));
  find("save-csv").addEventListener("click", () => download(fileName("csv"), [csv()], "text/csv"));
};
