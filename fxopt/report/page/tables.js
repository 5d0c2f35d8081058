// Rewrites and near misses, as tables that sort, filter and open.

function rewritesOf(data, found) {
  const rows = found.passes.flatMap((ran) => [
    ...ran.changes.map((note) => ({ pass: ran.name, note, state: "" })),
    ...ran.rolled_back.map((note) => ({ pass: ran.name, note, state: "taken back: " })),
  ]);
  if (!rows.length) return null;
  const columns = [
    { head: "pass", value: (row) => row.pass },
    { head: "what changed", value: (row) => row.state + row.note.text, wide: true },
    { head: "places", value: (row) => row.note.count, number: true },
    { head: "where", value: (row) => whereOf(row.note) },
    { head: "why that is safe", value: (row) => row.note.why, wide: true },
  ];
  return section("What changed, and why that is safe", tableOf("rewrites", columns, rows, (row) => noteDetail(data, row.note)));
}

function missesOf(data, found) {
  const rows = found.passes.flatMap((ran) => ran.misses.map((note) => ({ pass: ran.name, note })));
  rows.push(...found.leaves.map((note) => ({ pass: "kept as it is", note })));
  if (!rows.length) return null;
  rows.sort((one, other) => (other.note.stake || 0) - (one.note.stake || 0));
  const columns = [
    { head: "pass", value: (row) => row.pass },
    { head: "reason", value: (row) => row.note.text, wide: true },
    { head: "saves at most", value: (row) => row.note.stake ?? 0, shown: (row) => seconds(row.note.stake), number: true },
    { head: "places", value: (row) => row.note.count, number: true },
    { head: "where", value: (row) => whereOf(row.note) },
  ];
  return section("What did not change, and why", tableOf("misses", columns, rows, (row) => noteDetail(data, row.note)));
}

function whereOf(note) {
  return [note.first.module, note.first.line].filter(Boolean).join(" at ");
}

function noteDetail(data, note) {
  const side = (title, nodes) =>
    element("div", {}, element("p", { class: "quiet" }, title), element("pre", {}, nodes.join("\n") || "nothing"));
  return element("div", {},
    note.before.length || note.after.length
      ? element("div", { class: "sides" }, side("nodes before", note.before), side("nodes after", note.after)) : null,
    note.why ? element("p", {}, note.why) : null, sourceOf(data, note.first));
}

// columns: { head, value(row), shown(row), number, wide }; detail(row): what a click on the row opens below it.
function tableOf(name, columns, rows, detail) {
  const body = element("tbody", {});
  const search = element("input", { type: "search", placeholder: "filter", "aria-label": `Filter ${name}` });
  const said = element("span", { class: "quiet" });
  const words = rows.map((row) => columns.map((column) => column.value(row)).join(" ").toLowerCase());
  let order = rows.map((_, number) => number), sorted = { column: null, sign: 1 };

  const show = () => {
    const wanted = search.value.toLowerCase();
    const found = order.filter((number) => words[number].includes(wanted));
    said.textContent = `${found.length} of ${rows.length}`;
    body.replaceChildren(...found.map((number) => rowOf(columns, rows[number], detail)));
  };
  const sort = (column) => {
    sorted = { column, sign: sorted.column === column ? -sorted.sign : column.number ? -1 : 1 };
    const compare = (one, other) => (one < other ? -1 : one > other ? 1 : 0) * sorted.sign;
    order.sort((one, other) => compare(column.value(rows[one]), column.value(rows[other])));
    show();
  };
  const heads = columns.map((column) => element("th", { class: column.number ? "number" : "" },
    element("button", { onclick: () => sort(column) }, column.head)));
  search.addEventListener("input", show);
  show();
  return element("div", { id: name }, element("div", { class: "controls" }, search, said),
    element("div", { class: "scroll" }, element("table", {}, element("thead", {}, element("tr", {}, heads)), body)));
}

function rowOf(columns, row, detail) {
  const cells = columns.map((column) => element("td",
    { class: [column.number ? "number" : "", column.wide ? "wide" : ""].join(" ") },
    String(column.shown ? column.shown(row) : column.value(row))));
  const made = element("tr", { class: "opens", tabindex: "0", "aria-expanded": "false" }, cells);
  const toggle = () => {
    const open = made.nextElementSibling?.classList.contains("detail");
    if (open) made.nextElementSibling.remove();
    else made.after(element("tr", { class: "detail" }, element("td", { colspan: columns.length }, detail(row))));
    made.setAttribute("aria-expanded", String(!open));
  };
  made.addEventListener("click", toggle);
  made.addEventListener("keydown", (event) => { if (event.key === "Enter") toggle(); });
  return made;
}
