// The links that reach farthest with most weight: what a long text is searched for.
const NEEDLES = 12;
const needles = { found: [], at: -1 };

const findNeedles = () => {
  const found = [];
  const { top } = shown;
  const reach = Math.max(1, queries().length - 1, keys().length - 1);
  const same = !across();
  for (let place = 0; top && place < top.keys.length; place += 1) {
    const [query, key] = [Math.floor(place / top.k), top.keys[place]];
    if (top.weights[place] === 0 || apart().has(key) || queries().apart.has(query)) continue;
    const distance = Math.abs(query - key);
    if (same && distance < 2) continue;
    found.push({ query, key, share: top.weights[place], distance, score: Math.abs(top.weights[place]) * (same ? distance / reach : 1) });
  }
  return found.sort((a, b) => b.score - a.score).slice(0, NEEDLES);
};
const snippet = (table, index) => {
  const [before, word, after] = table.snippet(index);
  return make("bdi", { className: "snippet" }, [before, make("b", { textContent: word }), after]);
};
const drawNeedles = () => {
  const long = Math.max(queries().length, keys().length) > 128;
  needles.found = long && !record.signed ? findNeedles() : [];
  needles.at = -1;
  find("needles-part").hidden = needles.found.length === 0;
  find("needles").replaceChildren(...needles.found.map((one, place) => {
    const button = make("button", { type: "button" }, [snippet(queries(), one.query), " → ", snippet(keys(), one.key)]);
    button.addEventListener("click", () => showNeedle(place));
    const apart = across() ? "" : `, ${one.distance} tokens apart`;
    return make("li", {}, [button, make("span", { className: "hint", textContent: ` ${one.share.toFixed(3)}${apart}` })]);
  }));
};
const showNeedle = (place) => {
  needles.at = place;
  const { query, key } = needles.found[place];
  choose({ side: "query", token: query, key, row: query - view.rows / 2, column: key - view.columns / 2 });
  [...find("needles").children].forEach((item, index) => item.classList.toggle("chosen", index === place));
};
const bindNeedles = () => {
  find("needle").addEventListener("click", () => { if (needles.found.length > 0) showNeedle((needles.at + 1) % needles.found.length); });
};
