"use strict";
(async () => {
  const record = JSON.parse(document.getElementById("record").textContent);
  const find = (id) => document.getElementById(id);
  const make = (tag, properties = {}, children = []) => {
    const node = Object.assign(document.createElement(tag), properties);
    node.append(...children);
    return node;
  };
  const word = (text) => make("bdi", { textContent: text });

  const inflate = async (text) => {
    const characters = atob(text);
    const bytes = new Uint8Array(characters.length);
    for (let index = 0; index < bytes.length; index += 1) bytes[index] = characters.charCodeAt(index);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Response(stream).arrayBuffer();
  };
  const packed = await inflate(record.weights);
  const widened = (bytes) => {
    const squares = Uint16Array.from({ length: 256 }, (_, byte) => Math.round((byte / 255) ** 2 * 65535));
    const wide = new Uint16Array(bytes.length);
    for (let index = 0; index < bytes.length; index += 1) wide[index] = squares[bytes[index]];
    return wide;
  };
  const numbers = record.bits === 16 ? new Uint16Array(packed) : widened(new Uint8Array(packed));
  for (const site of record.sites) {
    const size = site.queries.length * site.keys.length;
    site.maps = site.starts.map((start) => (start === null ? null : numbers.subarray(start, start + size)));
  }

  const state = { layer: record.layer, head: record.head, query: record.query };
  const site = () => record.sites[state.layer];
  const weight = (query, key) => site().maps[state.head][query * site().keys.length + key] / 65535;

  // Colours: one ramp for each scheme, indexed by the square root of the weight so that small weights show.
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const ramps = {
    light: [[255, 255, 255], [178, 205, 236], [66, 122, 190], [8, 34, 88]],
    dark: [[24, 28, 33], [35, 74, 122], [88, 153, 214], [238, 247, 255]],
  };
  const colour = (share) => {
    const ramp = dark.matches ? ramps.dark : ramps.light;
    const place = Math.sqrt(Math.min(1, Math.max(0, share))) * (ramp.length - 1);
    const low = Math.min(Math.floor(place), ramp.length - 2);
    return ramp[low].map((part, channel) => Math.round(part + (ramp[low + 1][channel] - part) * (place - low)));
  };

  // From a 16-bit weight to a step of the ramp, and from a step to a pixel: two look-ups a cell, also for long texts.
  const steps = Uint8Array.from({ length: 65536 }, (_, value) => Math.round(Math.sqrt(value / 65535) * 255));
  const pixels = () => {
    const bytes = new Uint8ClampedArray(256 * 4);
    for (let step = 0; step < 256; step += 1) bytes.set([...colour((step / 255) ** 2), 255], step * 4);
    return new Uint32Array(bytes.buffer);
  };
  let table = pixels();
  const paint = (canvas, map, rows, columns) => {
    canvas.width = columns;
    canvas.height = rows;
    if (map.length === 0) return;
    const image = new ImageData(columns, rows);
    const cells = new Uint32Array(image.data.buffer);
    for (let index = 0; index < map.length; index += 1) cells[index] = table[steps[map[index]]];
    canvas.getContext("2d").putImageData(image, 0, 0);
  };

  const small = [];
  const drawHeads = () => {
    const most = Math.max(...record.sites.map((one) => one.maps.length));
    const top = make("tr", {}, [make("th", { textContent: "" })]);
    for (let head = 0; head < most; head += 1) top.append(make("th", { scope: "col", textContent: String(head) }));
    const body = record.sites.map((one, layer) => {
      const row = make("tr", {}, [make("th", { scope: "row", textContent: String(layer), title: one.title })]);
      one.maps.forEach((map, head) => {
        if (map === null) {
          row.append(make("td", { className: "left-out", textContent: "–", title: "not in this page" }));
          return;
        }
        const canvas = make("canvas");
        const button = make("button", { type: "button", title: `layer ${layer}, head ${head}: ${one.patterns[head]}` }, [canvas]);
        button.setAttribute("aria-label", button.title);
        button.addEventListener("click", () => choose({ layer, head }));
        small.push({ canvas, button, map, layer, head, one });
        row.append(make("td", {}, [button]));
      });
      return row;
    });
    find("heads").replaceChildren(make("table", {}, [make("thead", {}, [top]), make("tbody", {}, body)]));
  };
  const paintHeads = () => small.forEach((item) => paint(item.canvas, item.map, item.one.queries.length, item.one.keys.length));

  const fill = (select, count, allowed, chosen) => {
    const options = [];
    for (let value = 0; value < count; value += 1) {
      if (allowed(value)) options.push(make("option", { value: String(value), textContent: String(value), selected: value === chosen }));
    }
    select.replaceChildren(...options);
  };

  const cellSize = () => Math.max(2, Math.min(30, Math.floor(560 / Math.max(site().queries.length, site().keys.length))));
  const labels = (tokens, className, side, cell) => {
    const spans = tokens.map((token) => {
      const span = make("span", { title: token.text }, [word(token.text)]);
      span.style[side] = `${cell}px`;
      return span;
    });
    const group = make("div", { className: `${className} labels` }, spans);
    group.style.fontSize = `${Math.min(12, cell)}px`;
    return group;
  };

  const drawMap = () => {
    const one = site();
    const cell = cellSize();
    const canvas = make("canvas", { tabIndex: 0 });
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", "The weights of this head. Arrow keys up and down choose the token that looks.");
    paint(canvas, one.maps[state.head], one.queries.length, one.keys.length);
    canvas.style.width = `${one.keys.length * cell + 2}px`;
    canvas.style.height = `${one.queries.length * cell + 2}px`;
    const at = (event) => {
      const box = canvas.getBoundingClientRect();
      const place = (offset, count) => Math.max(0, Math.min(count - 1, Math.floor((offset - 1) / cell)));
      return [place(event.clientY - box.top, one.queries.length), place(event.clientX - box.left, one.keys.length)];
    };
    canvas.addEventListener("mousemove", (event) => say(...at(event)));
    canvas.addEventListener("mouseleave", () => drawReading());
    canvas.addEventListener("click", (event) => choose({ query: at(event)[0] }));
    canvas.addEventListener("keydown", (event) => {
      const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (step === undefined) return;
      event.preventDefault();
      choose({ query: Math.max(0, Math.min(one.queries.length - 1, state.query + step)) });
    });
    const named = cell >= 8;
    const rows = named ? labels(one.queries, "row-labels", "height", cell) : make("span");
    const columns = named ? labels(one.keys, "column-labels", "width", cell) : make("span");
    find("map").replaceChildren(make("span"), columns, rows, canvas);
  };

  const say = (query, key) => {
    const share = weight(query, key).toFixed(3);
    find("said").replaceChildren(word(site().queries[query].text), " → ", word(site().keys[key].text), `: ${share}`);
  };

  const shade = (node, share) => {
    const [red, green, blue] = colour(share);
    node.style.background = `rgb(${red} ${green} ${blue})`;
    node.style.color = red * 0.3 + green * 0.59 + blue * 0.11 > 130 ? "#101418" : "#f4f6f8";
  };

  const drawTokens = () => {
    const one = site();
    const across = one.cross;
    const chip = (tag) => (token) => make(tag, { className: token.special ? "special" : "" }, [word(token.text)]);
    const buttons = one.queries.map(chip("button"));
    buttons.forEach((button, query) => {
      button.type = "button";
      button.addEventListener("click", () => choose({ query }));
    });
    find("tokens").replaceChildren(...buttons);
    find("keys-part").hidden = !across;
    find("keys").replaceChildren(...(across ? one.keys.map(chip("span")) : []));
  };

  const drawReading = () => {
    const one = site();
    [...find("tokens").children].forEach((node, query) => node.setAttribute("aria-pressed", String(query === state.query)));
    const shaded = find("keys-part").hidden ? find("tokens") : find("keys");
    [...shaded.children].forEach((node, key) => shade(node, weight(state.query, key)));
    const mark = (group, chosen) => [...group.children].forEach((node, index) => node.classList.toggle("chosen", index === chosen));
    document.querySelectorAll(".row-labels").forEach((group) => mark(group, state.query));
    const order = one.keys.map((_, key) => key).sort((a, b) => weight(state.query, b) - weight(state.query, a)).slice(0, 8);
    find("rows").replaceChildren(...order.map((key) => {
      const bar = make("div", { className: "bar" });
      bar.style.width = `${100 * weight(state.query, key)}%`;
      const cells = [[word(one.keys[key].text)], [weight(state.query, key).toFixed(3)], [bar]];
      return make("tr", {}, cells.map((content) => make("td", {}, content)));
    }));
    if (order.length > 0) say(state.query, order[0]);
  };

  const choose = (change) => {
    const before = { ...state };
    Object.assign(state, change);
    const one = site();
    if (!one.maps[state.head]) state.head = one.maps.findIndex((map) => map !== null);
    state.query = Math.min(state.query, one.queries.length - 1);
    if (before.layer !== state.layer || before.head !== state.head) drawHead();
    else drawReading();
  };

  const drawHead = () => {
    const one = site();
    find("head-title").textContent = `Layer ${state.layer}, head ${state.head}: ${one.patterns[state.head]}`;
    fill(find("layer"), record.sites.length, (layer) => record.sites[layer].maps.some((map) => map !== null), state.layer);
    fill(find("head"), one.maps.length, (head) => one.maps[head] !== null, state.head);
    small.forEach((item) => item.button.setAttribute("aria-pressed", String(item.layer === state.layer && item.head === state.head)));
    drawMap();
    drawTokens();
    drawReading();
  };

  const drawScale = () => {
    const shares = Uint16Array.from({ length: 160 }, (_, index) => Math.round((index / 159) * 65535));
    paint(find("scale").querySelector("canvas"), shares, 1, 160);
  };

  find("layer").addEventListener("change", (event) => choose({ layer: Number(event.target.value) }));
  find("head").addEventListener("change", (event) => choose({ head: Number(event.target.value) }));
  dark.addEventListener("change", () => { table = pixels(); paintHeads(); drawScale(); drawHead(); });
  drawHeads();
  paintHeads();
  drawScale();
  drawHead();
  document.body.dataset.ready = "true";
})();
