// The page: polls the server, and shows the result. No external assets are loaded.

import { drawHeat, drawProgress, drawRanks } from "/charts.js";

const INTERVAL_MS = 2000;
const LOG_EVERY = 3;
const at = (id) => document.getElementById(id);
let shown = null;
let mayEnd = false;
let round = 0;
let lastRun = null;
const compared = new Set(); // keys of the runs whose curves are added
const known = new Map(); // curves of ended runs, by key
history.replaceState(null, "", location.pathname + location.hash); // the token is in a cookie now

async function ask(path) {
  const answer = await fetch(path, { headers: { Accept: "application/json" } });
  if (!answer.ok) throw new Error(answer.status === 401 ? "the token is no longer valid" : `HTTP ${answer.status}`);
  return answer;
}

function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e9)) return value.toExponential(2);
  return Number.isInteger(value) ? value.toLocaleString("en") : value.toLocaleString("en", { maximumSignificantDigits: digits });
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return `${whole} s`;
  const pad = (value) => String(value).padStart(2, "0");
  const hours = Math.floor(whole / 3600), minutes = Math.floor((whole % 3600) / 60);
  return hours ? `${hours}:${pad(minutes)}:${pad(whole % 60)}` : `${minutes}:${pad(whole % 60)}`;
}

const milliseconds = (value) => (value === null || value === undefined ? "–" : `${number(value * 1000, 3)} ms`);
const percent = (value) => (value === null || value === undefined ? "–" : `${number(100 * value, 3)} %`);
const mebibytes = (value) => (value === null || value === undefined ? "–" : `${number(value / 2 ** 20, 4)} MiB`);

// Returns the box that adds the curves of a run to those of the run that is shown.
function compareBox(key) {
  const box = document.createElement("input");
  Object.assign(box, { type: "checkbox", checked: compared.has(key), title: "Compare: add its curves" });
  box.setAttribute("aria-label", `Compare ${key}`);
  box.dataset.key = key;
  box.addEventListener("change", () => {
    if (box.checked) compared.add(key); else compared.delete(key);
    look();
  });
  return box;
}

function showJobs(jobs) {
  const list = at("jobs");
  const wanted = decodeURIComponent(location.hash.slice(1));
  const has = (key) => jobs.some((job) => job.key === key);
  shown = has(wanted) ? wanted : has(shown) ? shown : jobs[0]?.key ?? null; // keep the selection when new runs appear
  const rows = jobs.map((job) => {
    const item = document.createElement("li");
    const link = document.createElement("a");
    link.href = `#${encodeURIComponent(job.key)}`;
    if (job.key === shown) link.setAttribute("aria-current", "page");
    const state = document.createElement("small");
    const step = job.step === null ? "" : `, step ${number(job.step)}${job.num_steps ? ` of ${number(job.num_steps)}` : ""}`;
    state.textContent = `${job.run}: ${job.state}${step}`;
    state.className = job.state;
    link.append(job.job, state);
    item.append(compareBox(job.key), link);
    return item;
  });
  const { activeElement: active } = document;
  const focused = list.contains(active) ? active.getAttribute("href") ?? active.dataset.key : null;
  list.replaceChildren(...rows);
  if (focused) list.querySelector(`[href="${CSS.escape(focused)}"], [data-key="${CSS.escape(focused)}"]`)?.focus();
  [...compared].filter((key) => !has(key)).forEach((key) => compared.delete(key));
  at("empty").hidden = jobs.length > 0;
  if (jobs.length === 0) at("run").hidden = true;
}

// A training job reports progress twice a second; an evaluation may take longer than this.
const LATE_S = 30;
const isLate = (run) => !run.has_ended && run.last_step_unix_s !== null && run.now_unix_s - run.last_step_unix_s > LATE_S;
const lossTitle = (run) => (run.loss_is_local ? "Loss of rank 0" : "Loss");

function tiles(run) {
  const left = run.samples_per_s && run.num_steps && run.global_batch_size
    ? ((run.num_steps - run.step) * run.global_batch_size) / run.samples_per_s : null;
  const entries = {
    Step: run.num_steps ? `${number(run.step)} of ${number(run.num_steps)}` : number(run.step),
    ...(run.epochs_begun === null ? {} : { Epoch: run.num_epochs ? `${number(run.epochs_begun)} of ${number(run.num_epochs)}` : number(run.epochs_begun) }),
    [lossTitle(run)]: run.loss_is_finite ? number(run.loss, 5) : "not finite",
    "Samples/s": isLate(run) ? `no step for ${duration(run.now_unix_s - run.last_step_unix_s)}` : number(run.samples_per_s),
    "Learning rate": number(run.lr),
    Ranks: run.world_size_desired && run.world_size_desired !== run.world_size_present
      ? `${number(run.world_size_present)} of ${number(run.world_size_desired)}` : number(run.world_size_present),
    ETA: run.has_ended || isLate(run) ? "–" : duration(left),
    "Last checkpoint": run.checkpoint_error ? "could not be written" : run.checkpoint_unix_s ? `${duration(run.now_unix_s - run.checkpoint_unix_s)} ago` : "–",
    Restarts: number(Math.max(0, run.num_attempts - 1)),
    ...Object.fromEntries(Object.entries(run.metrics).map(([name, value]) => [`Evaluation: ${name}`, number(value)])),
  };
  const list = at("numbers");
  const names = Object.keys(entries);
  if ([...list.children].map((tile) => tile.dataset.name).join() !== names.join()) {
    list.replaceChildren(...names.map((name) => {
      const tile = document.createElement("div"), title = document.createElement("dt"), value = document.createElement("dd");
      tile.dataset.name = name;
      title.textContent = name;
      tile.append(title, value);
      return tile;
    }));
  }
  names.forEach((name, place) => put(list.children[place].lastChild, entries[name]));
}

// The reason why no straggler is reported.
function nobody(run) {
  const { rank, own_s: own, step_s: steps, window_s: seconds } = run.ranks;
  if (!steps?.some((value) => value !== null)) return "Unknown: no step times received yet.";
  if (rank.length === 1) return "Not applicable: the job has one rank.";
  if (!own?.some((value) => value !== null)) return "Unknown: this framework or device does not separate all-reduce wait from computation.";
  if (seconds < run.min_window_s) {
    return run.has_ended ? `Unknown: trained for ${number(seconds, 2)} s; at least ${run.min_window_s} s are needed.`
      : `Unknown before ${run.min_window_s} s of training.`;
  }
  return `No straggler: in the last ${number(seconds, 2)} s, no own time was more than 20 % above the median.`;
}

function findings(run) {
  const found = run.findings.map((each) => {
    const where = each.phase ? `; ${milliseconds(each.excess_s)} of the excess in phase ${each.phase}` : "";
    const idle = each.waited_for ? ` On average, ${number(each.waited_for, 2)} ranks wait for it.` : "";
    return `Rank ${each.rank}: own time ${milliseconds(each.own_s)} per step, median of the others ${milliseconds(each.others_s)}${where}.${idle}`;
  });
  const away = run.missing_ranks;
  if (away && !run.has_ended) {
    const who = away.ranks.length ? `${away.ranks.length > 1 ? "Ranks" : "Rank"} ${away.ranks.slice(0, 20).join(", ")} ${away.ranks.length > 1 ? "have" : "has"} not entered it.`
      : "All ranks wait, in different collectives.";
    found.unshift(`Ranks have been waiting in a collective for ${duration(away.seconds)}. ${who}`);
  }
  const dead = run.ranks.state.flatMap((state, rank) => (state === "dead" && !run.has_ended ? [rank] : []));
  if (dead.length) found.unshift(`${dead.length > 1 ? "Ranks" : "Rank"} ${dead.slice(0, 20).join(", ")} cannot be scraped, or ${dead.length > 1 ? "are" : "is"} lost.`);
  const texts = found.length ? found.slice(0, 8) : [nobody(run)];
  const list = at("findings");
  if ([...list.children].map((item) => item.textContent).join("\n") === texts.join("\n")) return;
  list.replaceChildren(...texts.map((text) => {
    const item = document.createElement("li");
    item.textContent = text;
    return item;
  }));
}

const COLUMNS = [
  ["Rank", "rank", number], ["Host", "host", (text) => text || "–"], ["State", "state", (text) => text || "–"],
  ["Own time", "own_s", milliseconds], ["Step time", "step_s", milliseconds], ["Waiting", "waiting", percent],
  ["Ranks waiting for it", "waited_for", (value) => number(value, 3)], ["Samples/s", "samples_per_s", number],
  ["Steps", "now_steps", number], ["Loss", "now_loss", (value) => number(value, 5)],
  ["Memory", "now_resident_memory_bytes", mebibytes], ["Device memory", "now_device_memory_allocated_bytes", mebibytes],
  ["GPU", "now_gpu_utilization_ratio", percent], ["Power", "now_gpu_power_watts", (value) => `${number(value, 3)} W`],
  ["GPU temperature", "now_gpu_temperature_celsius", (value) => `${number(value, 3)} °C`],
];
const MAX_ROWS = 200;

function rankTable(ranks) {
  const columns = COLUMNS.filter(([, key]) => ranks[key]);
  const table = at("ranks");
  const titles = columns.map(([title]) => title);
  if ([...table.tHead.querySelectorAll("th")].map((cell) => cell.textContent).join() !== titles.join()) {
    const row = document.createElement("tr");
    row.append(...titles.map((title) => {
      const cell = document.createElement("th");
      cell.scope = "col";
      cell.textContent = title;
      return cell;
    }));
    table.tHead.replaceChildren(row);
    table.tBodies[0].replaceChildren();
  }
  let order = ranks.rank;
  if (order.length > MAX_ROWS) {
    const badness = (rank) => (ranks.state[rank] === "dead" || ranks.state[rank] === "failed" ? 1e9 : ranks.own_s?.[rank] ?? 0);
    order = [...order].sort((a, b) => badness(b) - badness(a)).slice(0, MAX_ROWS);
  }
  const body = table.tBodies[0];
  while (body.rows.length > order.length) body.deleteRow(-1);
  order.forEach((rank, place) => {
    const row = body.rows[place] ?? body.insertRow();
    row.dataset.rank = rank;
    columns.forEach(([, key, format], column) => {
      const cell = row.cells[column] ?? row.insertCell();
      put(cell, format(ranks[key][rank]));
      if (key === "state") cell.className = ranks.state[rank];
    });
  });
}

const EVENT_TEXT = {
  attempt: (event) => `attempt ${event.number}: ${event.num_ranks} ranks${event.hosts.length ? ` on ${event.hosts.join(", ")}` : ""}`,
  checkpoint: (event) => (event.error ? `checkpoint failed: ${event.error}` : `checkpoint ${event.path.split("/").pop()}`),
  evaluation: (event) => `evaluation after epoch ${event.epoch}: ${Object.entries(event.metrics).map(([name, value]) => `${name} ${number(value)}`).join(", ")}`,
  failure: (event) => `rank ${event.rank} on ${event.host} ${event.is_cause ? "failed" : "failed as a consequence"}: ${event.message.split("\n")[0]}`,
  hosts_lost: (event) => `lost: ${event.hosts.join(", ")}`,
  notice: (event) => event.text,
  opened: (event) => `run of ${event.job} started`,
  script_done: (event) => `the script has ended: ${number(event.steps)} steps in ${duration(event.seconds)}`,
  preempted: (event) => `rank ${event.rank} preempted; checkpoint at step ${event.step}`,
  resumed: (event) => `resumed from ${event.checkpoint}, step ${event.step}`,
  stalled: (event) => `ranks missing from ${event.collective} for ${duration(event.seconds)}: ${event.absent_ranks.join(", ")}`,
  started: (event) => `training begins on ${event.world_size} rank(s)`,
  state: (event) => `state: ${event.state}${event.message ? `, ${event.message.split("\n")[0]}` : ""}`,
  summary: (event) => `trained: ${event.steps} steps in ${duration(event.seconds)}`,
};

function eventList(events) {
  const list = at("events");
  const key = events.length ? `${events.length} ${events.at(-1).time_unix_s}` : "none";
  if (list.dataset.key === key) return;
  list.dataset.key = key;
  list.replaceChildren(...events.toReversed().map((event) => {
    const item = document.createElement("li"), when = document.createElement("time");
    const date = new Date(event.time_unix_s * 1000);
    when.dateTime = date.toISOString();
    when.textContent = date.toLocaleTimeString("en-GB");
    item.append(when, EVENT_TEXT[event.kind]?.(event) ?? event.kind);
    return item;
  }));
}

// Shows where the files of the run are.
function places(run) {
  const query = [run.key, ...compared].map((key) => `key=${encodeURIComponent(key)}`).join("&");
  const several = compared.size - compared.has(run.key) > 0;
  const entries = [
    ["Run folder", run.folder], ["Newest checkpoint", run.checkpoint_path],
    ...run.trackers.map(({ name, place }) => [`Tracker ${name}`, place]),
    ["Report", run.folder ? [several ? "download a comparison" : "download", `/page/report?${query}`] : null],
  ].filter(([, text]) => text);
  const list = at("places");
  const key = JSON.stringify(entries);
  if (list.dataset.key === key) return;
  list.dataset.key = key;
  list.replaceChildren(...entries.flatMap(([name, value]) => {
    const title = document.createElement("dt"), text = document.createElement("dd");
    const [shownText, href] = Array.isArray(value) ? value : [value, /^https?:[/][/]/.test(value) ? value : null];
    title.textContent = name;
    if (href) {
      const link = document.createElement("a");
      Object.assign(link, { href, textContent: shownText, rel: "noopener noreferrer" });
      text.append(link);
    } else {
      text.textContent = shownText;
    }
    return [title, text];
  }));
}

// Returns the curves of the run that is shown, and of those that are compared with it.
async function curves(run) {
  const others = [...compared].filter((key) => key !== run.key);
  const found = await Promise.all(others.map(async (key) => {
    if (!known.get(key)?.has_ended) known.set(key, await (await ask(`/page/curves?key=${encodeURIComponent(key)}`)).json());
    return known.get(key);
  }));
  return [run, ...found];
}

function settings() {
  return { axis: at("axis").value, log: at("log-axis").checked, smoothing: Number(at("smoothing").value) };
}

async function showRun(run) {
  put(at("job"), run.job);
  put(at("run-id"), run.run);
  put(at("state"), run.state);
  at("state").className = `state ${run.state}`;
  put(at("message"), run.message);
  at("actions").hidden = !mayEnd || run.has_ended;
  document.title = `${run.job}: ${run.state}`;
  at("numbers").classList.toggle("late", isLate(run));
  tiles(run);
  findings(run);
  rankTable(run.ranks);
  eventList(run.events);
  places(run);
  at("run").hidden = false; // after filling it, so that the layout does not shift
  put(at("loss-caption"), lossTitle(run));
  put(at("heat-caption"), run.heat.is_own
    ? "Own time per step, by rank: step time minus all-reduce wait"
    : "Time of a step, by rank: this framework does not separate all-reduce wait");
  await drawHeat(run.heat);
  await Promise.all([drawProgress(await curves(run), settings()), drawRanks(run.ranks)]);
}

async function showLog(key) {
  const text = await (await ask(`/page/log?key=${encodeURIComponent(key)}`)).text();
  const log = at("log");
  const isAtEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 4;
  put(log, text || "no log on this host");
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

async function look() {
  try {
    const document_ = await (await ask("/page/jobs")).json();
    mayEnd = document_.may_end;
    showJobs(document_.jobs);
    if (shown !== null) {
      lastRun = await (await ask(`/page/run?key=${encodeURIComponent(shown)}`)).json();
      await showRun(lastRun);
      if (round++ % LOG_EVERY === 0) await showLog(shown);
    }
    put(at("connection"), `as of ${new Date().toLocaleTimeString("en-GB")}`);
    at("connection").className = "";
    document.body.classList.remove("stale");
  } catch (error) {
    const gone = lastRun?.has_ended ? "the page server has exited; restart with `horovod-train serve`"
      : "the server of this page does not answer";
    put(at("connection"), error instanceof TypeError ? gone : `update failed: ${error.message}`);
    at("connection").className = "lost";
    document.body.classList.add("stale"); // the content is outdated
  }
}

async function end(how, question) {
  const key = shown; // the selection may change while the dialog is open
  if (!confirm(`${key}: ${question}`)) return;
  const jobId = encodeURIComponent(key.replace("/", "-"));
  const query = lastRun?.folder && lastRun.key === key ? `?folder=${encodeURIComponent(lastRun.folder)}` : "";
  const answer = await fetch(`/api/v1/jobs/${jobId}/${how}${query}`, { method: "POST" });
  const told = answer.headers.get("Content-Type")?.startsWith("application/json") ? (await answer.json()).message : await answer.text();
  put(at("message"), answer.ok ? "request sent" : told);
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  if (lastRun) showRun(lastRun);
}

const prefersDark = matchMedia("(prefers-color-scheme: dark)");
setTheme(prefersDark.matches ? "dark" : "light");
prefersDark.addEventListener("change", () => setTheme(prefersDark.matches ? "dark" : "light"));
at("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
at("drain").addEventListener("click", () => end("drain", "drain: save a checkpoint and exit?"));
at("cancel").addEventListener("click", () => end("cancel", "cancel? Ranks may save a checkpoint within the grace period (launch.grace_s)."));
at("settings").addEventListener("input", () => { if (lastRun) showRun(lastRun); });
at("settings").addEventListener("submit", (event) => event.preventDefault());
addEventListener("hashchange", () => { round = 0; look(); });

// Polls sequentially: a slow server has at most one pending request.
for (;;) {
  await look();
  await new Promise((resolve) => { setTimeout(resolve, document.hidden ? 5 * INTERVAL_MS : INTERVAL_MS); });
}
