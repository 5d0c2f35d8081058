// Operators against what the machine reaches: bytes, operations, the least time they allow, and the measured one.

const MAIN = 12; // operators that are shown

function rooflineOf(data, found, batch) {
  const { bandwidth, arithmetic } = data.machine;
  if (!bandwidth || !arithmetic) return null;
  const rows = [["before", found.before], ["now", found.after]].flatMap(([side, blocks]) =>
    blocks.filter((block) => block.seconds[batch] > 0 && block.bytes[batch] > 0)
      .sort((one, other) => other.seconds[batch] - one.seconds[batch]).slice(0, MAIN)
      .map((block) => pointOf(data, block, side, batch, bandwidth, arithmetic)));
  if (!rows.length) return null;
  const columns = [
    { head: "", value: (row) => row.side },
    { head: "operators", value: (row) => row.name, wide: true },
    { head: "bytes", value: (row) => row.bytes, shown: (row) => large(row.bytes, "B"), number: true },
    { head: "operations", value: (row) => row.operations, shown: (row) => large(row.operations, "FLOP"), number: true },
    { head: "floor", value: (row) => row.floor, shown: (row) => seconds(row.floor), number: true },
    { head: "measured", value: (row) => row.spent, shown: (row) => seconds(row.spent), number: true },
    { head: "over floor", value: (row) => row.spent / row.floor, shown: (row) => times(row.spent / row.floor), number: true },
  ];
  return section(`How close to what the machine allows, at batch ${Number(batch).toLocaleString("en")}`,
    chartOf(rows.filter((row) => row.operations > 0), bandwidth, arithmetic),
    tableOf("roofline", columns, rows, (row) => element("pre", {}, row.steps.join("\n"))),
    quiet(`Floor: the larger of bytes at ${large(bandwidth, "B/s")}, the rate of a large copy, and operations at ` +
      `${large(arithmetic, "FLOP/s")}, the rate of a large fp32 product. Data that stays in a cache can beat it.`));
}

function pointOf(data, block, side, batch, bandwidth, arithmetic) {
  const steps = block.steps.map((step) => data.texts[step]);
  const bytes = block.bytes[batch], operations = block.operations[batch], spent = block.seconds[batch];
  const floor = Math.max(bytes / bandwidth, operations / arithmetic);
  const name = (block.count > 1 ? `${block.count} x ` : "") + steps.slice(0, 3).join(" > ") + (steps.length > 3 ? " ..." : "");
  return { side, name, kind: block.kind, steps, bytes, operations, spent, floor };
}

// Log-log: operations a byte across, operations a second up. A point below the roof has room.
function chartOf(points, bandwidth, arithmetic) {
  if (!points.length) return null;
  const width = 640, height = 300, left = 70, bottom = 40;
  const xs = points.map((point) => point.operations / point.bytes), ys = points.map((point) => point.operations / point.spent);
  const ridge = arithmetic / bandwidth;
  const [x0, x1] = [Math.min(...xs, ridge) / 2, Math.max(...xs, ridge) * 4];
  const [y0, y1] = [Math.min(...ys, x0 * bandwidth) / 2, Math.max(...ys, arithmetic) * 2];
  const scale = (value, low, high, from, to) => from + (to - from) * Math.log(value / low) / Math.log(high / low);
  const x = (value) => scale(value, x0, x1, left, width - 10), y = (value) => scale(value, y0, y1, height - bottom, 10);
  const chart = drawn("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, width: "100%", role: "img",
    "aria-label": "roofline" });
  for (const tick of ticks(y0, y1)) {
    chart.append(drawn("line", { class: "grid", x1: left, x2: width - 10, y1: y(tick), y2: y(tick) }),
      drawn("text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, large(tick, "")));
  }
  for (const tick of ticks(x0, x1)) {
    chart.append(drawn("text", { x: x(tick), y: height - bottom + 18, "text-anchor": "middle" }, String(tick)));
  }
  const corner = Math.max(ridge, x0);
  chart.append(drawn("path", { class: "roof",
    d: `M${x(x0)} ${y(x0 * bandwidth)}L${x(corner)} ${y(Math.min(arithmetic, corner * bandwidth))}L${x(x1)} ${y(arithmetic)}` }));
  points.forEach((point, number) => {
    const color = `fill: ${point.side === "now" ? colorOf(point.kind) : "none"}; stroke: ${colorOf(point.kind)}; stroke-width: 2`;
    chart.append(drawn("circle", { cx: x(xs[number]), cy: y(ys[number]), r: 6, style: color },
      drawn("title", {}, `${point.side}: ${point.name}, ${seconds(point.spent)}, floor ${seconds(point.floor)}`)));
  });
  chart.append(drawn("text", { x: (left + width) / 2, y: height - 4, "text-anchor": "middle" },
    "operations a byte (up: operations a second; circles: before, dots: now)"));
  return element("div", { style: "max-width: 760px" }, chart);
}

function ticks(low, high) {
  const found = [];
  for (let power = Math.ceil(Math.log10(low)); power <= Math.log10(high); power++) found.push(Number(`1e${power}`));
  return found;
}
