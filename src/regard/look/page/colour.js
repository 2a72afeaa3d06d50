// One ramp a scheme, indexed by the square root of the weight so that small weights show. Both are safe for colour-blind eyes.
const dark = matchMedia("(prefers-color-scheme: dark)");
const ramp = () => record.ramps[record.signed ? "signed" : "weight"][dark.matches ? "dark" : "light"];
const colour = (share) => {
  const steps = ramp();
  const size = Math.sign(share) * Math.sqrt(Math.min(1, Math.abs(share)));
  const place = (record.signed ? (size + 1) / 2 : Math.max(0, size)) * (steps.length - 1);
  const low = Math.min(Math.floor(place), steps.length - 2);
  return steps[low].map((part, channel) => Math.round(part + (steps[low + 1][channel] - part) * (place - low)));
};
const STEPS = 1024;
const pixelTable = () => {
  const bytes = new Uint8ClampedArray((STEPS + 1) * 4);
  for (let step = 0; step <= STEPS; step += 1) {
    const size = record.signed ? (2 * step) / STEPS - 1 : step / STEPS;
    bytes.set([...colour(Math.sign(size) * size ** 2), 255], step * 4);
  }
  return new Uint32Array(bytes.buffer);
};
let pixels = pixelTable();
const pixelOf = (share) => {
  const size = Math.sqrt(Math.min(1, Math.abs(share)));
  return pixels[Math.round((record.signed ? (share < 0 ? 1 - size : 1 + size) / 2 : size) * STEPS)];
};
const inkOn = ([red, green, blue]) => (red * 0.3 + green * 0.59 + blue * 0.11 > 130 ? "#101418" : "#f4f6f8");
const shade = (node, share) => {
  const parts = colour(share);
  node.style.background = `rgb(${parts.join(" ")})`;
  node.style.color = inkOn(parts);
};
const style = (name) => getComputedStyle(document.body).getPropertyValue(name).trim();
const text = (share, digits = 3) => (record.signed && share > 0 ? "+" : "") + share.toFixed(digits);

// The cells [row0, row1) x [column0, column1) of a grid of values, one pixel each.
const bitmap = (values, stride, row0, row1, column0, column1) => {
  const canvas = make("canvas", { width: column1 - column0, height: row1 - row0 });
  if (canvas.width === 0 || canvas.height === 0) return canvas;
  const image = new ImageData(canvas.width, canvas.height);
  const cells = new Uint32Array(image.data.buffer);
  let place = 0;
  for (let row = row0; row < row1; row += 1) {
    for (let column = column0; column < column1; column += 1) cells[place++] = pixelOf(values[row * stride + column]);
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
};

// A canvas of so many CSS pixels, sharp on every screen.
const sized = (canvas, width, height) => {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.imageSmoothingEnabled = false;
  return pen;
};
const family = "system-ui, sans-serif";
