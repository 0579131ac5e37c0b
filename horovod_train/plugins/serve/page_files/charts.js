// Charts of the page and of reports. On the page, Plotly is loaded in parallel; a report contains it.

const QUIET = { displayModeBar: false, responsive: true };
const loaded = window.Plotly ? Promise.resolve(window.Plotly) : new Promise((resolve, reject) => {
  const script = document.createElement("script");
  script.src = "/plotly.js";
  script.onload = () => resolve(window.Plotly);
  script.onerror = () => reject(new Error("the charts could not be loaded"));
  document.head.append(script);
});

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const time = (seconds) => new Date(seconds * 1000);

function layout(extra) {
  const axis = { gridcolor: colour("line"), zerolinecolor: colour("line"), automargin: true };
  return {
    margin: { l: 46, r: 12, t: 8, b: 34 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: colour("text"), size: 12 },
    showlegend: false,
    uirevision: "same",
    ...extra,
    xaxis: { ...axis, ...extra?.xaxis },
    yaxis: { ...axis, ...extra?.yaxis },
  };
}

const EMPTY = {
  xaxis: { visible: false },
  yaxis: { visible: false },
  annotations: [{ text: "no data yet", showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5 }],
};

async function draw(id, traces, extra, description, config = QUIET) {
  const plotly = await loaded;
  const known = (values) => values?.some((value) => (Array.isArray(value) ? known(value) : value !== null && value !== undefined));
  if (!traces.some((trace) => known(trace.z ?? trace.y))) [traces, extra] = [[], EMPTY];
  const element = document.getElementById(id);
  if (!element) return; // removed, because another run is shown
  element.setAttribute("aria-label", description);
  await plotly.react(element, traces, layout(extra), config);
}

const COLORS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999999", "#8a5a00"];

// Returns the places of the points that are valid by step: after a return to a checkpoint, those of the
// repeated steps are the later ones.
function current(steps) {
  const kept = [];
  for (let place = steps.length - 1, least = Infinity; place >= 0; place -= 1) {
    if (steps[place] < least) { kept.unshift(place); least = steps[place]; }
  }
  return kept;
}

// Returns the exponential moving average of a series, corrected for its start; null stays null.
function smoothed(values, weight) {
  let sum = 0, total = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

// Returns x and y of a series of a run, by time, step or epoch.
function onAxis(run, points, values, axis) {
  if (axis === "time") return [points.time_unix_s.map(time), values];
  const places = current(points.step);
  const scale = axis === "epoch" ? run.num_epochs / run.num_steps : 1;
  return [places.map((place) => points.step[place] * scale), places.map((place) => values[place])];
}

const hasEpochs = (run) => Boolean(run.num_epochs && run.num_steps);

// Draws one series of several runs. `pick` returns the points of a run and the values.
function line(id, runs, pick, name, settings) {
  const axis = settings.axis === "epoch" && !runs.every(hasEpochs) ? "step" : settings.axis;
  const traces = runs.flatMap((run, place) => {
    const [points, values] = pick(run);
    if (!values) return [];
    const [x, y] = onAxis(run, points, values, axis);
    const color = place ? COLORS[(place - 1) % COLORS.length] : colour("accent");
    const raw = { x, y, name: run.key, line: { color, width: 1.5 }, mode: x.length < 3 ? "lines+markers" : "lines" };
    if (!settings.smoothing) return [raw];
    return [{ ...raw, opacity: 0.25, showlegend: false, hoverinfo: "skip" }, { ...raw, y: smoothed(y, settings.smoothing) }];
  });
  const isZeroBased = name === "Samples/s" || name === "Learning rate";
  const yaxis = settings.log ? { type: "log" } : { rangemode: isZeroBased ? "tozero" : "normal" };
  const now = last(pick(runs[0])[1] ?? []);
  return draw(id, traces, {
    xaxis: axis === "time" ? {} : { title: { text: axis } },
    yaxis,
    showlegend: runs.length > 1,
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" },
    uirevision: `${axis} ${settings.log}`,
  }, `${name} over ${axis}, now ${now}`);
}

// Returns the chart with an id; creates it if it does not exist.
function chartWith(id, title) {
  if (!document.getElementById(id)) {
    const figure = document.createElement("figure"), caption = document.createElement("figcaption"), chart = document.createElement("div");
    Object.assign(chart, { id, className: "chart", role: "img" });
    figure.append(caption, chart);
    document.getElementById("chart-lr").closest("figure").before(figure);
  }
  document.getElementById(id).previousSibling.textContent = title;
  return id;
}

const last = (values) => values.findLast((value) => value !== null) ?? "unknown";

// Draws a chart for each further series of the first run, and removes those of the run that was shown before.
function drawSeries(kind, runs, names, title, pick, settings) {
  for (let place = names.length, chart; (chart = document.getElementById(`chart-${kind}-${place}`)); place += 1) {
    chart.closest("figure").remove();
  }
  return names.map((name, place) => line(
    chartWith(`chart-${kind}-${place}`, title(name)), runs, (run) => pick(run, name), title(name), settings));
}

// Draws loss, throughput, rate, evaluations and further numbers of runs; the first one is the run of the page.
export function drawProgress(runs, settings) {
  const ofPoints = (name) => (run) => [run.points, run.points[name]];
  return Promise.all([
    line("chart-loss", runs, ofPoints("loss"), "Loss", settings),
    line("chart-speed", runs, ofPoints("samples_per_s"), "Samples/s", settings),
    line("chart-lr", runs, ofPoints("lr"), "Learning rate", settings),
    ...drawSeries("evaluation", runs, Object.keys(runs[0].evaluations.metrics), (name) => `Evaluation: ${name}`,
      (run, name) => [run.evaluations, run.evaluations.metrics[name]], settings),
    ...drawSeries("number", runs, Object.keys(runs[0].points.numbers), (name) => name,
      (run, name) => [run.points, run.points.numbers[name]], settings),
  ]);
}

export async function drawHeat(heat) {
  const milliseconds = heat.rows.map((row) => row.map((value) => (value === null ? null : value * 1000)));
  // The scale ends at twice the median, so that equal ranks have equal colors, and 20 % more is visible. The
  // first window is ignored, because it contains warm-up steps.
  const warm = heat.time_unix_s.length > 1 ? 1 : 0;
  const all = milliseconds.flatMap((row) => row.slice(warm)).filter((value) => value !== null).sort((a, b) => a - b);
  const middle = all[all.length >> 1] ?? 1;
  const trace = {
    type: "heatmap",
    x: [heat.begun_unix_s, ...heat.time_unix_s].map(time), // edges of the columns
    y: heat.rows.map((_, rank) => rank),
    z: milliseconds,
    zmin: 0,
    zmax: Math.max(2 * middle, all[Math.floor(all.length * 0.98)] ?? 0),
    colorscale: "YlOrRd",
    reversescale: true,
    colorbar: { title: { text: "ms" }, thickness: 12, outlinewidth: 0 },
    hovertemplate: "rank %{y}<br>%{x|%H:%M:%S}<br>%{z:.3g} ms a step<extra></extra>",
  };
  const few = heat.rows.length <= 20;
  const yaxis = { title: { text: "rank" }, autorange: "reversed", ...(few ? { dtick: 1 } : {}) };
  await draw("chart-heat", [trace], { yaxis },
    `Own time of a step of ${heat.rows.length} ranks over ${heat.time_unix_s.length} moments; the table of ranks has the numbers`);
  document.getElementById("chart-heat").dataset.drawn = String(heat.rows.length);
}

const PHASE_COLOURS = {
  data: "#e69f00", forward: "#56b4e9", backward: "#0072b2", compute: "#009e73", allreduce_wait: "#999999", optimizer: "#cc79a7",
};

// Returns the ranks to draw: all, or the `most` ranks with the largest values.
function chosen(values, most) {
  const ranks = values.map((_, rank) => rank);
  if (ranks.length <= most) return ranks;
  return ranks.sort((a, b) => (values[b] ?? -1) - (values[a] ?? -1)).slice(0, most).sort((a, b) => a - b);
}

export function drawRanks(ranks) {
  const phases = ranks.phases_s ?? {};
  const own = ranks.own_s ?? ranks.rank.map(() => null);
  const shown = chosen(own, 24);
  const names = shown.map((rank) => `${rank}`);
  const bars = Object.entries(phases).map(([phase, values]) => ({
    type: "bar", name: phase, x: names, y: shown.map((rank) => (values[rank] ?? 0) * 1000),
    marker: { color: PHASE_COLOURS[phase] },
    hovertemplate: `rank %{x}<br>${phase}: %{y:.3g} ms<extra></extra>`,
  }));
  const axis = { type: "category", title: { text: shown.length < own.length ? "rank (the slowest)" : "rank" } };
  const waited = ranks.waited_for ?? [];
  const most = chosen(waited, 24);
  const largest = Math.max(0.1, ...waited.map((value) => value ?? 0));
  const idle = [{
    type: "bar", x: most.map((rank) => `${rank}`), y: most.map((rank) => waited[rank]),
    marker: { color: colour("accent") }, hovertemplate: "rank %{x}: %{y:.3g} ranks wait<extra></extra>",
  }];
  return Promise.all([
    draw("chart-phases", bars, {
      barmode: "stack", showlegend: true, legend: { orientation: "v" }, xaxis: axis,
      yaxis: { title: { text: "ms a step" } },
    }, "Time of the phases of a step, by rank; the table of ranks has the numbers"),
    draw("chart-waited", idle, { xaxis: axis, yaxis: { title: { text: "ranks" }, range: [0, 1.05 * largest] } },
      "Ranks that wait for a rank; the table of ranks has the numbers"),
  ]);
}
