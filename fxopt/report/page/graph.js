// The graph before and after as pictures: boxes of parts that look alike, in levels from the inputs to the outputs.

const MANY = 8; // boxes of one kind in one level that are folded into one
const MOST_EDGES = 400;

function graphsOf(data, found, batch) {
  if (!found.before.length) return null;
  const after = found.after.length ? found.after : [];
  return section("The graph before and after",
    quiet("Parts that look alike are one box. A click shows its operators, its times and your source."),
    element("div", { class: "graphs" },
      element("div", {}, element("p", {}, `As captured: ${count(found.operators_before, "operator")}`),
        pictureOf(data, found.before, batch, "before")),
      element("div", {}, element("p", {}, `Now: ${count(found.operators_after, "operator")}`),
        after.length ? pictureOf(data, after, batch, "after") : quiet("It does not run operator by operator."))));
}

function pictureOf(data, blocks, batch, name) {
  const lines = drawn("svg", {});
  const picture = element("div", { class: "picture", id: `graph-${name}` }, lines);
  const shown = new Array(blocks.length); // the element that stands for each block now
  const redraw = () => requestAnimationFrame(() => edges(picture, lines, blocks, shown));
  for (const level of levelsOf(blocks)) {
    picture.append(element("div", { class: "level" }, folded(data, blocks, level, batch, shown, redraw)));
  }
  new ResizeObserver(redraw).observe(picture);
  return picture;
}

// Blocks come behind those that they read; a level holds what may run at one time.
function levelsOf(blocks) {
  const level = [], levels = [];
  blocks.forEach((block, number) => {
    level[number] = 1 + Math.max(-1, ...block.reads.map((read) => level[read]));
    (levels[level[number]] ||= []).push(number);
  });
  return levels;
}

function folded(data, blocks, numbers, batch, shown, redraw) {
  const byKind = Map.groupBy ? Map.groupBy(numbers, (number) => blocks[number].kind) : grouped(blocks, numbers);
  return [...byKind].flatMap(([kind, members]) => {
    if (members.length <= MANY) return members.map((number) => boxOf(data, blocks, number, batch, shown));
    const parts = members.reduce((sum, number) => sum + blocks[number].count, 0);
    const spent = members.reduce((sum, number) => sum + (blocks[number].seconds[batch] || 0), 0);
    const inside = element("div", { class: "level", hidden: "" });
    const stand = element("button", { class: "box", style: `border-left-color: ${colorOf(kind)}`, "aria-expanded": "false" },
      element("b", {}, `${parts.toLocaleString("en")} x ${kind}`),
      element("small", {}, `${members.length} forms; ${seconds(spent)}; click to unfold`));
    stand.addEventListener("click", () => {
      if (!inside.childElementCount) inside.append(...members.map((number) => boxOf(data, blocks, number, batch, [])));
      inside.hidden = !inside.hidden;
      stand.setAttribute("aria-expanded", String(!inside.hidden));
      redraw();
    });
    members.forEach((number) => { shown[number] = stand; });
    return [element("div", { class: "fold" }, stand, inside)];
  });
}

function grouped(blocks, numbers) {
  const groups = new Map();
  for (const number of numbers) {
    const kind = blocks[number].kind;
    if (!groups.has(kind)) groups.set(kind, []);
    groups.get(kind).push(number);
  }
  return groups;
}

function boxOf(data, blocks, number, batch, shown) {
  const block = blocks[number];
  const names = block.steps.map((step) => data.texts[step].split(" ")[0]);
  const title = names.length > 4 ? [...names.slice(0, 3), "...", names[names.length - 1]] : names;
  const spent = block.seconds[batch];
  const box = element("button", {
    class: "box", style: `border-left-color: ${colorOf(block.kind)}`, onclick: () => showBlock(data, block),
  }, element("b", {}, (block.count > 1 ? `${block.count.toLocaleString("en")} x ` : "") + title.join(" > ")),
  element("small", {}, block.kind + (spent ? `, ${seconds(spent)}` : "")));
  shown[number] = box;
  return box;
}

function showBlock(data, block) {
  const heads = ["batch", "own time", "bytes", "operations"];
  const rows = Object.keys(block.seconds).map((batch) =>
    [batch, seconds(block.seconds[batch]), large(block.bytes[batch], "B"), large(block.operations[batch], "FLOP")]);
  showDetails(
    element("h3", {}, `${count(block.count, "part")} of ${block.kind}`),
    element("pre", {}, block.steps.map((step) => data.texts[step]).join("\n")),
    rows.length ? element("table", {}, element("tr", {}, heads.map((head) => element("th", { class: "number" }, head))),
      rows.map((cells) => element("tr", {}, cells.map((cell) => element("td", { class: "number" }, cell))))) : null,
    element("h3", {}, "Where they come from"), partsOf(data, block));
}

// A list of thousands is searched, and shows its first ones.
function partsOf(data, block) {
  const list = element("div", {});
  const search = element("input", { type: "search", placeholder: "filter by module or file", "aria-label": "Filter" });
  const show = () => {
    const found = block.parts.filter((part) => part.join(" ").includes(search.value));
    const lines = [...new Set(found.map((part) => part[1]))];
    const more = block.count - block.parts.length;
    list.replaceChildren(
      ...lines.slice(0, 3).map((line) => sourceOf(data, { module: "", line })),
      element("pre", {}, found.slice(0, 200).map((part) => part.filter(Boolean).join(" at ") || "forward").join("\n")),
      quiet(`${count(found.length, "place")}${found.length > 200 ? ", 200 shown" : ""}` +
        (more > 0 ? `; ${more} more are left out of this page` : "")));
  };
  search.addEventListener("input", show);
  show();
  return element("div", {}, block.count > 10 ? search : null, list);
}

function edges(picture, lines, blocks, shown) {
  const frame = picture.getBoundingClientRect();
  const at = (box, bottom) => {
    const place = box.getBoundingClientRect();
    const x = place.left + place.width / 2 - frame.left + picture.scrollLeft;
    return [x, (bottom ? place.bottom : place.top) - frame.top + picture.scrollTop];
  };
  const seen = new Set(), ids = new Map(), paths = [];
  const id = (box) => { if (!ids.has(box)) ids.set(box, ids.size); return ids.get(box); };
  blocks.forEach((block, number) => block.reads.forEach((read) => {
    const key = `${id(shown[read])}-${id(shown[number])}`;
    if (seen.has(key) || shown[read] === shown[number] || paths.length >= MOST_EDGES) return;
    seen.add(key);
    const [x0, y0] = at(shown[read], true), [x1, y1] = at(shown[number], false), middle = (y0 + y1) / 2;
    paths.push(drawn("path", { d: `M${x0} ${y0}C${x0} ${middle} ${x1} ${middle} ${x1} ${y1}` }));
  }));
  lines.setAttribute("width", picture.scrollWidth);
  lines.setAttribute("height", picture.scrollHeight);
  lines.replaceChildren(...paths);
}
