// The headline, what to do, whole calls, and where their time goes.

const KINDS = [
  "embedding columns", "index preparation", "linear layers", "interaction", "opaque submodules", "other",
  "between operators", "backward, and between operators",
];

function colorOf(kind) {
  const place = KINDS.indexOf(kind);
  return `var(--k${place < 0 ? 5 : Math.min(place, 6)})`;
}

function headlineOf(found) {
  const gains = found.measurements.map((m) =>
    element("div", { class: "gain" },
      element("b", { class: m.speedup === null ? "warn" : m.speedup >= 1.05 ? "good" : "" },
        m.speedup === null ? (m.distrust ? "busy" : "not timed") : times(m.speedup)),
      `batch ${m.batch.toLocaleString("en")}`,
      element("div", { class: "quiet" }, m.eager === null ? m.problem : `${seconds(m.eager)} to ${seconds(m.optimized)}`),
      element("div", { class: "quiet" }, m.max_error === null ? "" : `largest error ${error(m.max_error)}`)));
  return [
    element("p", { class: found.eager_reason ? "headline warn" : "headline" }, found.headline),
    element("p", { class: "quiet mono" }, found.inputs),
    found.eager_reason ? element("p", { class: "warn" }, found.eager_reason) : null,
    element("div", { class: "gains" }, gains),
  ];
}

function adviceOf(data, found) {
  if (!found.advice.length) return null;
  const items = found.advice.map((advice) =>
    element("li", {}, advice.text,
      advice.gain === null ? null : element("b", { class: "good" },
        ` Saves at most ${seconds(advice.gain)} of a call at batch ${advice.batch.toLocaleString("en")}.`),
      advice.place.line ? sourceOf(data, advice.place) : null));
  return section("What you could do", element("ol", { class: "advice" }, items));
}

function callsOf(data, found) {
  if (!found.measurements.length) return null;
  const others = found.measurements[0].others.map((other) => other.name);
  const heads = ["batch", "eager", "fxopt", "speed-up", "quartiles", ...others, "largest error"];
  const rows = found.measurements.map((m) => [
    m.batch.toLocaleString("en"), seconds(m.eager), seconds(m.optimized), m.distrust ? "busy" : times(m.speedup),
    m.quartiles && !m.distrust ? m.quartiles.map(times).join(" to ") : "",
    ...m.others.map((other) => other.problem ? "failed" : `${seconds(other.seconds)} ${times(other.speedup)}`),
    error(m.max_error),
  ]);
  const problems = found.measurements.flatMap((m) =>
    [m.problem, m.distrust, ...m.others.map((other) => other.problem && `${other.name}: ${other.problem}`)]
      .filter(Boolean).map((text) => element("p", { class: "warn" }, `batch ${m.batch}: ${text}`)));
  const what = data.training ? "training steps, forward and backward" : "whole calls without gradients";
  return section("Time per call",
    element("div", { class: "scroll" }, element("table", { id: "calls" },
      element("tr", {}, heads.map((head) => element("th", { class: "number" }, head))),
      rows.map((cells) => element("tr", {}, cells.map((cell) => element("td", { class: "number" }, cell)))))),
    problems, quiet(`Times of ${what} in turns: medians of the fastest of each turn. Results were compared first.`));
}

function spendingOf(found) {
  const measured = found.measurements.filter((m) => m.spending.length);
  if (!measured.length) return null;
  const kinds = [...new Set(measured.flatMap((m) => m.spending.map((spent) => spent.kind)))];
  return section("Where the time goes",
    measured.map((m) => element("div", { class: "spent" },
      barOf(`batch ${m.batch.toLocaleString("en")}, eager`, m.spending, "before", m.eager),
      barOf("fxopt", m.spending, "after", m.eager))),
    element("div", { class: "legend" }, kinds.map((kind) =>
      element("span", {}, element("i", { style: `background: ${colorOf(kind)}` }), kind))),
    quiet("Operators by their own time. The parts of a bar add up to the whole call."));
}

function barOf(label, spending, side, scale) {
  const total = spending.reduce((sum, spent) => sum + (spent[side] || 0), 0);
  const parts = spending.filter((spent) => spent[side] > 0).map((spent) =>
    element("i", {
      style: `width: ${100 * spent[side] / Math.max(scale, total)}%; background: ${colorOf(spent.kind)}`,
      title: `${spent.kind}: ${seconds(spent[side])}, ${percent(spent[side] / total)}`,
    }));
  return element("div", { class: "row" }, element("span", { class: "label quiet" }, label),
    element("div", { class: "bar" }, parts), element("span", { class: "value" }, seconds(total)));
}
