
document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";

// Plotly reads titles and names as HTML, with links.
const plain = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");

function trace(chart, curve, place) {
  const color = PHASE_COLOURS[curve.name] ?? COLORS[place % COLORS.length];
  if (chart.kind === "bars") return { type: "bar", name: plain(curve.name), x: curve.x, y: curve.y, marker: { color } };
  const mode = curve.x.length < 3 || curve.spread ? "lines+markers" : "lines";
  const spread = curve.spread ? { error_y: { type: "data", array: curve.spread, thickness: 1, width: 3 } } : {};
  return { name: plain(curve.name), x: curve.x, y: curve.y, mode, line: { color, width: 1.5 }, ...spread };
}

function horizontal(chart) {
  if (chart.kind === "bars") return { type: "category" };
  if (!chart.is_log) return {};
  const values = [...new Set(chart.curves.flatMap((curve) => curve.x))].sort((a, b) => a - b);
  return { type: "log", tickvals: values, ticktext: values.map(String) };
}

// Plotly would draw a constant between -1 and 1 around it.
function vertical(chart) {
  const values = chart.curves.flatMap((curve) => curve.y).filter((value) => value !== null);
  const isConstant = chart.kind === "lines" && values.length > 0 && values.every((value) => value === values[0]);
  return isConstant && values[0] !== 0 ? { range: [Math.min(0, 2 * values[0]), Math.max(0, 2 * values[0])] } : {};
}

EMPTY.annotations[0].text = "no finite values";

// A button of each chart saves it as a picture.
const withPicture = (title) => ({
  responsive: true, displaylogo: false, modeBarButtons: [["toImage"]],
  toImageButtonOptions: { format: "svg", filename: title.replaceAll(/[^A-Za-z0-9]+/g, "-") },
});

const charts = JSON.parse(document.getElementById("charts").textContent);
await Promise.all(charts.map((chart, place) => {
  const traces = chart.curves.map((curve, number) => trace(chart, curve, number));
  const isLong = chart.curves.length > 1;
  return draw(`chart-${place}`, traces, {
    barmode: "stack",
    paper_bgcolor: colour("background"),
    showlegend: isLong,
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" },
    xaxis: { title: { text: plain(chart.x_title) }, ...horizontal(chart) },
    yaxis: { title: { text: isLong ? "" : plain(chart.y_title) }, ...vertical(chart) },
  }, `${chart.title}; the tables have the numbers`, withPicture(chart.title));
}));
document.documentElement.dataset.drawn = String(charts.length);
