"""Style and script of report.html. Class names of one letter belong to the pipeline's drawings."""

STYLE = """
:root { color-scheme: light dark;
  --paper: #f6f7f9; --card: #ffffff; --ink: #1b2129; --soft: #5c6775; --grid: #e7eaef; --edge: #d9dee5;
  --line: #2866c8; --l0: #c2410c; --l1: #0a7d5a; --l2: #8a3fb0; --l3: #7a6a00; --odd: #cf222e; --given: #0a7d5a; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #101317; --card: #181c22; --ink: #e5e9ef; --soft: #98a4b3; --grid: #262c35; --edge: #2d343f;
  --line: #74a9ff; --l0: #f59a5b; --l1: #4fd1a5; --l2: #cf9bea; --l3: #d9c45a; --odd: #ff7b72; --given: #4fd1a5; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, Helvetica, Arial, sans-serif; }
main { max-width: 1320px; margin: 0 auto; padding: 28px 24px 56px; }
h1 { font-size: 24px; margin: 0 0 2px; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 36px 0 12px; }
h3 { font-size: 14px; margin: 0; font-weight: 600; }
.about { color: var(--soft); margin: 0 0 20px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: 12px; margin-bottom: 16px; }
.card { background: var(--card); border: 1px solid var(--edge); border-radius: 10px; padding: 14px 16px;
  min-width: 0; }
.tile .name { color: var(--soft); font-size: 13px; }
.tile .value { font-size: 22px; font-weight: 600; font-variant-numeric: tabular-nums; white-space: nowrap; }
.tile .unit { display: block; font-size: 13px; font-weight: 400; color: var(--soft); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(480px, 100%), 1fr)); gap: 16px; }
.head { display: flex; justify-content: space-between; align-items: baseline; gap: 12px; flex-wrap: wrap; }
.head .unit, .legend { color: var(--soft); font-weight: 400; font-size: 13px; }
output { color: var(--ink); font-size: 13px; font-variant-numeric: tabular-nums; min-height: 1.5em; }
svg.chart { display: block; width: 100%; height: auto; margin-top: 6px; touch-action: pan-y; }
svg.chart text { font-size: 11px; fill: var(--soft); font-variant-numeric: tabular-nums; }
.grid { stroke: var(--grid); } .base { stroke: var(--edge); }
.line { fill: none; stroke: var(--line); stroke-width: 1.8; stroke-linejoin: round; }
.band { fill: var(--line); opacity: 0.22; } .dot { fill: var(--line); } .odd { fill: var(--odd); }
.level { stroke-width: 1.4; stroke-dasharray: 6 4; }
.l0 { stroke: var(--l0); } .l1 { stroke: var(--l1); } .l2 { stroke: var(--l2); } .l3 { stroke: var(--l3); }
.cursor { stroke: var(--soft); stroke-dasharray: 2 3; visibility: hidden; }
.legend { display: flex; gap: 4px 16px; flex-wrap: wrap; margin-top: 2px; }
.legend svg { width: 22px; height: 8px; vertical-align: middle; margin-right: 5px; }
.tables { columns: 2 480px; column-gap: 16px; }
.tables .card { break-inside: avoid; margin-bottom: 16px; }
table { border-collapse: collapse; width: 100%; font-size: 13px; margin-top: 6px; }
td { padding: 4px 10px 4px 0; border-top: 1px solid var(--grid); vertical-align: top; overflow-wrap: anywhere; }
td:first-child { color: var(--soft); width: 210px; min-width: 120px; }
td.given { color: var(--given); font-weight: 600; }
td.from { color: var(--soft); font-size: 12px; text-align: right; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.45 ui-monospace, Menlo, Consolas,
  "DejaVu Sans Mono", monospace; }
.timeline { overflow-x: auto; margin-bottom: 16px; } .timeline svg { display: block; min-width: 720px; width: 100%; }
.timeline svg > rect[width="100%"] { fill: none; }
@media (prefers-color-scheme: dark) { .timeline svg { filter: invert(0.9) hue-rotate(180deg); } }
@media print { body { background: none; } .card { break-inside: avoid; } }
"""

# the value under the pointer, read from the data of the page; numbers that JSON cannot write are words there
SCRIPT = """
"use strict";
(() => {
  let records = null;
  const load = () => records ??= JSON.parse(document.getElementById("data").textContent).records;
  const nearest = (steps, wanted) => {
    let low = 0, high = steps.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (steps[middle] < wanted) low = middle; else high = middle;
    }
    return wanted - steps[low] < steps[high] - wanted ? low : high;
  };
  for (const chart of document.querySelectorAll("svg.chart")) {
    const cursor = chart.querySelector(".cursor"), told = chart.parentNode.querySelector("output");
    const {key, low, high, factor} = chart.dataset, [left, right] = [LEFT, RIGHT];
    chart.addEventListener("pointermove", event => {
      const rows = load(), box = chart.getBoundingClientRect();
      if (!rows.step.length) return;
      const at = (event.clientX - box.left) / box.width * WIDTH;
      const i = nearest(rows.step, +low + (at - left) / (right - left) * (high - low));
      const place = left + (rows.step[i] - low) / (high - low) * (right - left);
      cursor.setAttribute("x1", place); cursor.setAttribute("x2", place);
      cursor.style.visibility = "visible";
      const value = rows[key][i] === null ? NaN : Number(rows[key][i]) * factor;
      const words = rows[key][i] === null ? "not known" : !isFinite(value) ? String(value)
        : value && Math.abs(value) < 1e-3 ? value.toExponential(2)
        : Number(value.toPrecision(5)).toLocaleString("en", {maximumFractionDigits: 5});
      told.textContent = `step ${rows.step[i].toLocaleString("en")}: ${words}`;
    });
    chart.addEventListener("pointerleave", () => { cursor.style.visibility = "hidden"; told.textContent = ""; });
  }
})();
"""
