// Quantities as a person reads them, as in fxopt/report/units.py.

function seconds(value) {
  if (value === null || value === undefined) return "";
  if (value === 0) return "0";
  if (value >= 0.9995) return value.toFixed(1) + " s";
  const [number, unit] = value >= 0.9995e-3 ? [value * 1e3, "ms"] : [value * 1e6, "us"];
  return number.toFixed(number >= 99.95 ? 0 : number >= 9.995 ? 1 : 2) + " " + unit;
}

function times(factor) {
  if (factor === null || factor === undefined) return "";
  return factor.toFixed(factor < 0.995 ? 2 : factor >= 9.95 ? 0 : 1) + "x";
}

function percent(share) {
  return share > 0 && share < 0.005 ? "<1%" : Math.round(share * 100) + "%";
}

function error(value) {
  return value === null || value === undefined ? "" : value === 0 ? "none" : value.toPrecision(2);
}

function large(value, unit) {
  for (const [limit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (value >= limit) return (value / limit).toPrecision(3) + " " + letter + unit;
  }
  return value + " " + unit;
}

function count(number, noun) {
  return number.toLocaleString("en") + " " + noun + (number === 1 ? "" : "s");
}
