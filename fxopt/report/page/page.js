// Puts the page together, for the chosen signature and batch size.

const data = JSON.parse(document.getElementById("data").textContent);
const chosen = { signature: 0, batch: null };

function show() {
  const found = data.signatures[chosen.signature];
  const batches = found ? found.measurements.filter((m) => m.spending.length).map((m) => String(m.batch)) : [];
  if (!batches.includes(chosen.batch)) chosen.batch = batches.at(-1) ?? null;
  const parts = found ? [
    ...headlineOf(found), adviceOf(data, found), callsOf(data, found), spendingOf(found), choiceOfBatch(batches),
    graphsOf(data, found, chosen.batch), rewritesOf(data, found), missesOf(data, found),
    rooflineOf(data, found, chosen.batch), workOf(found),
  ] : [quiet("Nothing captured yet. Call the model once, or pass inputs to fxopt.report.")];
  document.getElementById("report").replaceChildren(
    element("h1", {}, `fxopt report: ${data.model}${data.training ? ", training" : ""}`),
    choiceOfSignature(), ...parts.flat().filter(Boolean), environment());
}

function choiceOfSignature() {
  if (data.signatures.length < 2) return "";
  const options = data.signatures.map((found, number) => [String(number), `${number + 1}: ${found.inputs || found.headline}`]);
  return choice("inputs", options, String(chosen.signature), (value) => { chosen.signature = Number(value); });
}

function choiceOfBatch(batches) {
  if (batches.length < 2) return null;
  const options = batches.map((batch) => [batch, Number(batch).toLocaleString("en")]);
  return choice("times below are of batch", options, chosen.batch, (value) => { chosen.batch = value; });
}

function choice(label, options, selected, take) {
  const made = element("select", { onchange: (event) => { take(event.target.value); show(); } },
    options.map(([value, text]) => element("option", { value, selected: value === selected ? "" : null }, text)));
  return element("label", { class: "controls" }, label, made);
}

function workOf(found) {
  const stages = Object.entries(found.seconds).map(([stage, spent]) => `${stage} ${seconds(spent)}`);
  const lines = [
    stages.length ? `Optimizing took ${stages.join(", ")}.` : null, found.graphs || null, found.untold || null,
    found.max_error === null ? null : `Compared with eager when it was captured; largest error ${error(found.max_error)}.`,
  ];
  return section("How it was done", lines.filter(Boolean).map((line) => element("p", {}, line)));
}

function environment() {
  const machine = data.machine;
  const on = machine.device === "cpu" ? "" : `, ${machine.device}`;
  return section("Where this was measured",
    element("p", {}, `${machine.cpu}, ${count(machine.threads, "thread")}${on}, torch ${machine.torch}, fxopt ${machine.fxopt}`),
    data.command ? element("pre", {}, data.command) : null);
}

show();
