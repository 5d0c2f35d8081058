// Elements, from names, attributes and children. Text is always text and never markup.

const SVG = "http://www.w3.org/2000/svg";

function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

function drawn(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(made, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined) made.setAttribute(key, value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

function section(title, ...children) {
  return element("section", {}, element("h2", {}, title), ...children);
}

function quiet(text) {
  return element("p", { class: "quiet" }, text);
}

// What a click on a box or a row shows.
function showDetails(...children) {
  const dialog = document.getElementById("details");
  const close = element("button", { onclick: () => dialog.close(), style: "float: right" }, "Close");
  dialog.replaceChildren(close, ...children);
  if (!dialog.open) dialog.showModal();
}

function sourceOf(data, place) {
  const text = data.sources[place.line];
  const where = [place.module, place.line].filter(Boolean).join(" at ") || "the model's forward";
  return element("div", {}, element("p", { class: "mono" }, where), text ? element("pre", {}, text) : null);
}
