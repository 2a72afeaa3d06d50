// What the page carries: unpacked when it is asked for, one head at a time.
const record = JSON.parse(document.getElementById("record").textContent);
const find = (id) => document.getElementById(id);
const make = (tag, properties = {}, children = []) => {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
};
const within = (value, low, high) => Math.max(low, Math.min(high, value));

const inflate = async (chunk) => {
  const characters = atob(record.chunks[chunk]);
  const bytes = new Uint8Array(characters.length);
  for (let index = 0; index < bytes.length; index += 1) bytes[index] = characters.charCodeAt(index);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
};

// 8 bits follow the square root of the weight, 16 bits the weight itself; a difference has its sign in the upper half.
const eighths = Float32Array.from({ length: 256 }, (_, code) => {
  if (!record.signed) return (code / 255) ** 2;
  const share = (code - 128) / 127;
  return Math.sign(share) * share ** 2;
});
const decode = (buffer, bits) => {
  const codes = bits === 8 ? new Uint8Array(buffer) : record.signed ? new Int16Array(buffer) : new Uint16Array(buffer);
  const values = new Float32Array(codes.length);
  const scale = record.signed ? 32767 : 65535;
  if (bits === 8) for (let index = 0; index < codes.length; index += 1) values[index] = eighths[codes[index]];
  else for (let index = 0; index < codes.length; index += 1) values[index] = codes[index] / scale;
  return values;
};

// Tokens: [text, start, stop, special]; a table without names is numbered.
const points = Array.from(record.text);
for (const table of record.tables) {
  table.name = (index) => (table.tokens ? table.tokens[index][0] : String(index));
  const seen = new Map();
  if (table.tokens) for (const [name] of table.tokens) seen.set(name, (seen.get(name) ?? 0) + 1);
  // Where several tokens have one name, their places tell them apart.
  table.told = (index) => (seen.get(table.name(index)) > 1 ? `${table.name(index)} (${index})` : table.name(index));
  table.special = (index) => Boolean(table.tokens && table.tokens[index][3]);
  table.apart = new Set();
  if (table.tokens) table.tokens.forEach((token, index) => token[3] && table.apart.add(index));
  table.marked = table.apart.size > 0;
  table.words = table.marked ? "special tokens" : "the first token";
  if (table.apart.size === 0 && table.length > 1 && !table.grid) table.apart.add(0);
  table.snippet = (index) => {
    const [text, start, stop] = table.tokens ? table.tokens[index] : [String(index), 0, 0];
    if (start === stop) return ["", text, ""];
    return [points.slice(Math.max(0, start - 24), start).join(""), points.slice(start, stop).join(""), points.slice(stop, stop + 24).join("")];
  };
}

// Blocks of 2 x 2 cells, again and again: their largest weight, so that no needle is lost, and their mean.
const halved = (level) => {
  const rows = Math.ceil(level.rows / 2);
  const columns = Math.ceil(level.columns / 2);
  const max = new Float32Array(rows * columns);
  const mean = new Float32Array(rows * columns);
  for (let row = 0; row < rows; row += 1) {
    const lower = Math.min(level.rows - 1, 2 * row + 1) * level.columns;
    const upper = 2 * row * level.columns;
    for (let column = 0; column < columns; column += 1) {
      const left = 2 * column;
      const right = Math.min(level.columns - 1, left + 1);
      const four = level.max;
      let most = four[upper + left];
      for (const other of [four[upper + right], four[lower + left], four[lower + right]]) if (Math.abs(other) > Math.abs(most)) most = other;
      max[row * columns + column] = most;
      mean[row * columns + column] = (level.mean[upper + left] + level.mean[upper + right] + level.mean[lower + left] + level.mean[lower + right]) / 4;
    }
  }
  return { rows, columns, max, mean };
};
const levelOf = (map, number) => {
  while (map.levels.length <= number) map.levels.push(halved(map.levels[map.levels.length - 1]));
  return map.levels[number];
};

const rowsOf = (site) => record.tables[site.queries].length;
const columnsOf = (site) => record.tables[site.keys].length;
// The largest weights of each row, as planes of bytes: of the keys, the lowest first, then of the weights.
const topOf = async (site, head) => {
  if (!head.top) return null;
  const bytes = new Uint8Array(await inflate(head.top.chunk));
  const count = rowsOf(site) * head.top.k;
  const planes = bytes.length / count;
  const plane = (number, place) => bytes[number * count + place];
  const keys = new Uint32Array(count);
  const codes = record.signed ? new Int16Array(count) : new Uint16Array(count);
  for (let place = 0; place < count; place += 1) {
    for (let number = planes - 3; number >= 0; number -= 1) keys[place] = keys[place] * 256 + plane(number, place);
    codes[place] = plane(planes - 2, place) + 256 * plane(planes - 1, place);
  }
  return { k: head.top.k, keys, weights: decode(codes.buffer, 16) };
};

// Rows that were kept whole.
const rowsKept = async (head, columns) => {
  const kept = new Map();
  if (!head.rows) return kept;
  const weights = decode(await inflate(head.rows.chunk), 16);
  head.rows.which.forEach((query, place) => kept.set(query, weights.subarray(place * columns, (place + 1) * columns)));
  return kept;
};

const opened = new Map();
const headOf = async (layer, number) => {
  const name = `${layer}.${number}`;
  if (!opened.has(name)) {
    const site = record.sites[layer];
    const head = site.heads[number];
    const { map } = head;
    const max = map ? decode(await inflate(map.chunk), map.bits) : null;
    const mean = map && map.mean !== null ? decode(await inflate(map.mean), map.bits) : max;
    if (opened.size > 5) opened.delete(opened.keys().next().value);
    opened.set(name, {
      site,
      head,
      whole: Boolean(map && map.whole),
      levels: map ? [{ ...map, max, mean }] : [],
      top: await topOf(site, head),
      rows: await rowsKept(head, columnsOf(site)),
    });
  }
  return opened.get(name);
};
