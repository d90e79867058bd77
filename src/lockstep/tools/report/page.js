"use strict";
// Reads values where the pointer or the keyboard is, zooms, and shows one rank. The curves are there already: zooming
// moves the inner picture of each chart (its viewBox) and writes new ticks. See drawing.py for the coordinates. A chart is
// as wide as there is room, so that its words keep their size on a phone. What was logged is drawn again where it is to be
// seen over steps, smoothed, or on a scale of powers of ten.
(() => {
  const X = 10000, Y = 1000, LEFT = 64, RIGHT = 12, ABOVE = 10, BELOW = 22, FAR = 100 * Y, SVG = "http://www.w3.org/2000/svg";
  const data = JSON.parse(document.getElementById("data").textContent);
  const find = (id) => document.getElementById(id);
  const { seconds, begins, ends, ranks } = data;
  const bins = begins.length, middle = begins.map((begin, bin) => (begin + ends[bin]) / 2);
  const bytesOf = (text) => Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
  const finite = Number.isFinite;

  // Figures, as scales.py writes them ---------------------------------------------------------------------------------

  const grouped = (number, places) => number.toLocaleString("en-US", { minimumFractionDigits: places, maximumFractionDigits: places });
  const digits = (value) => {
    const size = Math.abs(value);
    if (size >= 1e6 || (size && size < 1e-3)) return value.toExponential(2).replace(/e([+-])(\d)$/, "e$10$2");
    if (size >= 100) return grouped(value, 0);
    const text = value.toFixed(size ? Math.max(0, 2 - Math.floor(Math.log10(size) + 1e-12)) : 0);
    return text.includes(".") ? text.replace(/0+$/, "").replace(/\.$/, "") : text;
  };
  const size = (count) => {
    let value = count, unit = "bytes";
    for (const larger of ["KiB", "MiB", "GiB", "TiB"]) {
      if (value < 999.5) break;
      [value, unit] = [value / 1024, larger];
    }
    const places = unit === "bytes" || value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2, text = grouped(value, places);
    return `${places ? text.replace(/0+$/, "").replace(/\.$/, "") : text} ${unit}`;
  };
  const shown = (value, unit) => {
    if (!finite(value)) return "–";
    if (unit === "seconds") return Math.abs(value) >= 1 ? `${digits(value)} s` : `${digits(value * 1e3)} ms`;
    if (unit === "share") return `${digits(value * 100)}%`;
    if (unit === "bytes") return size(value);
    return unit === "rate" ? `${digits(value)}/s` : digits(value);
  };
  const moment = (at, step = 1) => {
    const tenths = Math.round(at * 10), minutes = Math.floor(tenths / 600), rest = tenths % 600;
    const last = step < 1 ? (rest / 10).toFixed(1).padStart(4, "0") : String(Math.floor(rest / 10)).padStart(2, "0");
    const hours = Math.floor(minutes / 60);
    return hours ? `${hours}:${String(minutes % 60).padStart(2, "0")}:${last}` : `${minutes}:${last}`;
  };
  const multiples = (low, high, step) => {
    const found = [];
    for (let place = Math.ceil(low / step - 1e-9); place <= Math.floor(high / step + 1e-9); place++) found.push(place * step + 0); // (no -0)
    return found;
  };
  const ticks = (low, high, most, unit) => {
    if (!(high > low)) return [low];
    const scale = unit === "bytes" ? (high >= 2 ** 30 ? 2 ** 30 : 2 ** 20) : unit === "share" ? 0.01 : 1;
    const rough = (high - low) / scale / most, power = 10 ** Math.floor(Math.log10(rough));
    return multiples(low, high, [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999) * power * scale);
  };
  const STEPS = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];
  const timeTicks = (low, high, most) => {
    const rough = (high - low) / most;
    return multiples(low, high, STEPS.find((step) => step >= rough) ?? 86400 * Math.ceil(rough / 86400));
  };

  // Charts ------------------------------------------------------------------------------------------------------------

  const charts = Object.entries(data.charts).map(([id, told]) => {
    const figure = find(id), svg = figure.querySelector(".chart");
    const chart = {
      ...told, id, figure, svg,
      title: figure.querySelector("h3").textContent,
      plot: svg.querySelector(".plot"), moments: svg.querySelector(".moments"), axis: svg.querySelector(".values"),
      cursor: svg.querySelector(".cursor"), chosen: svg.querySelector(".chosen"),
      outputs: new Map([...figure.querySelectorAll("output")].map((each) => [each.dataset.key, each])),
      most: Math.max(2, Math.floor(told.height / 30)),
    };
    if (told.table) chart.rows = new Float32Array(bytesOf(told.table).buffer);
    if (told.parts) chart.bytes = bytesOf(told.parts);
    chart.times = told.times ?? middle;
    chart.seen = told.values;
    chart.designed = told.width;
    return chart;
  });
  const state = { low: 0, high: seconds, at: null, rank: -1, row: null, overSteps: false, smooth: 0, powers: false };
  const logged = charts.filter((chart) => chart.kind === "metric");

  // The steps of the script, over time: those of the name that was logged most often.
  const way = { times: [0], steps: [0] };
  logged.reduce((most, chart) => (chart.steps.length > most.length ? chart.steps : most), []).forEach((step, place, steps) => {
    const { times } = logged.find((chart) => chart.steps === steps);
    if (!place) [way.times[0], way.steps[0]] = [Math.min(0, times[0]), step - 1e-9];
    if (times[place] > way.times.at(-1) && step > way.steps.at(-1)) { way.times.push(times[place]); way.steps.push(step); }
  });
  const between = (from, to, value) => {
    const after = Math.max(1, from.findIndex((each) => each >= value));
    if (from.length < 2 || value <= from[0]) return to[0];
    if (value >= from.at(-1)) return to.at(-1);
    return to[after - 1] + (to[after] - to[after - 1]) * (value - from[after - 1]) / (from[after] - from[after - 1]);
  };
  // What the horizontal axis of a chart counts: seconds, or steps.
  const isOverSteps = (chart) => state.overSteps && chart.kind === "metric";
  const placeIn = (chart, at) => (isOverSteps(chart) ? between(way.times, way.steps, at) : at);
  const wholeOf = (chart) => (isOverSteps(chart) ? [way.steps[0], way.steps.at(-1)] : [0, seconds]);
  const viewOf = (chart) => {
    const [low, high] = [placeIn(chart, state.low), placeIn(chart, state.high)];
    return high > low ? [low, high] : [low, low + 1];
  };

  const make = (name, attributes, parent) => {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    parent.append(element);
    return element;
  };
  const xOf = (chart, at) => {
    const [low, high] = viewOf(chart);
    return LEFT + chart.width * (placeIn(chart, at) - low) / (high - low);
  };
  const words = (parent, text, x, y, anchor) => {
    make("text", { x: x.toFixed(1), y: y.toFixed(1), "text-anchor": anchor }, parent).textContent = text;
  };

  // What the axis holds: all of it, or, where the view is zoomed, what is in view.
  const rangeOf = (chart) => {
    if (chart.kind === "stack" || chart.kind === "heat" || chart.kind === "lane" || isWhole()) return [chart.low, chart.high];
    let low = Infinity, high = -Infinity;
    const look = (value) => { if (finite(value)) { low = Math.min(low, value); high = Math.max(high, value); } };
    chart.times.forEach((time, place) => {
      if (time < state.low || time > state.high) return;
      if (chart.rows) for (let rank = 0; rank < ranks.length; rank++) look(chart.rows[rank * bins + place]);
      else look(chart.seen[place] ?? NaN);
    });
    if (!(high >= low)) return [chart.low, chart.high];
    if (chart.kind === "metric") {
      const room = 0.04 * (high - low) || 0.5 * Math.abs(high) || 0.5;
      return [low - room, high + room];
    }
    return [0, 1.05 * high || 1];
  };
  const isWhole = () => state.low === 0 && state.high === seconds;

  const frame = (chart) => {
    const [low, high] = rangeOf(chart), whole = (chart.high - chart.low) || 1;
    const top = chart.kind === "lane" ? 0 : Y * (chart.high - high) / whole;
    const tall = chart.kind === "lane" ? Y : Y * (high - low) / whole;
    const [first, last] = wholeOf(chart), [begin, end] = viewOf(chart), long = (last - first) || 1;
    const left = X * (begin - first) / long, wide = X * (end - begin) / long;
    chart.plot.setAttribute("viewBox", `${left} ${top} ${wide} ${tall}`);
    chart.moments.replaceChildren();
    const bottom = ABOVE + chart.height, most = Math.max(3, Math.floor(chart.width / 110)), overSteps = isOverSteps(chart);
    const moments = overSteps ? ticks(begin, end, most, "number").filter(Number.isInteger) : timeTicks(begin, end, most);
    const step = moments.length > 1 ? moments[1] - moments[0] : 1;
    for (const each of moments) {
      const x = LEFT + chart.width * (each - begin) / (end - begin);
      make("line", { x1: x.toFixed(1), x2: x.toFixed(1), y1: bottom, y2: bottom + 4 }, chart.moments);
      const isLast = overSteps && x + 36 > LEFT + chart.width + RIGHT, at = isLast ? LEFT + chart.width + RIGHT : x;
      words(chart.moments, overSteps ? `step ${grouped(each, 0)}` : moment(each, step), at, bottom + 16, isLast ? "end" : "middle");
    }
    if (chart.kind === "lane") {
      for (const sign of chart.svg.querySelectorAll(".sign")) {
        const at = Number(sign.dataset.at);
        sign.toggleAttribute("hidden", at < state.low || at > state.high);
        sign.setAttribute("transform", `translate(${xOf(chart, at).toFixed(1)} ${ABOVE})`);
      }
    } else if (chart.kind !== "heat" && chart.unit) {
      chart.axis.replaceChildren();
      const isPowers = chart.kind === "metric" && state.powers;
      for (const value of isPowers ? powerTicks(low, high, chart.most) : ticks(low, high, chart.most, chart.unit)) {
        const y = ABOVE + chart.height * (high - (isPowers ? Math.log10(value) : value)) / ((high - low) || 1);
        make("line", { x1: LEFT, x2: LEFT + chart.width, y1: y.toFixed(1), y2: y.toFixed(1) }, chart.axis);
        words(chart.axis, shown(value, chart.unit), LEFT - 6, y + 3.5, "end");
      }
    }
  };

  // As many units wide as there are pixels, where the chart would be drawn smaller; and charts below each other alike.
  const layOut = () => {
    const widest = Math.max(...charts.map((chart) => chart.figure.clientWidth));
    for (const chart of charts) {
      const room = chart.figure.clientWidth, wide = Math.max(120, room - LEFT - RIGHT);
      chart.width = room > 0.75 * widest && wide < 1000 ? wide : Math.min(chart.designed, wide);
      chart.svg.setAttribute("viewBox", `0 0 ${LEFT + chart.width + RIGHT} ${ABOVE + chart.height + BELOW}`);
      chart.plot.setAttribute("width", chart.width);
    }
  };

  // What was logged, over time or steps, smoothed, on either scale ------------------------------------------------------

  // Round values between two powers of ten: themselves, or with their twofold and fivefold, or as on the other scale.
  const powerTicks = (low, high, most) => {
    if (high - low < 1) return ticks(10 ** low, 10 ** high, most, "number").filter((value) => value > 0);
    const every = Math.max(1, Math.ceil((high - low) / (most + 1))), factors = high - low < 2 ? [1, 2, 5] : [1], found = [];
    for (let power = every * Math.floor(low / every); power <= high; power += every)
      for (const factor of factors) if (power + Math.log10(factor) >= low && power + Math.log10(factor) <= high) found.push(factor * 10 ** power);
    return found;
  };
  const spanOf = (values) => {
    const known = values.filter(finite);
    if (!known.length) return [0, 1];
    const low = Math.min(...known), high = Math.max(...known), room = 0.04 * (high - low) || 0.5 * Math.abs(high) || 0.5;
    return [low - room, high + room];
  };
  // A mean in which each value counts less by this part than the one after it; begun without a bias.
  const smoothed = (values, part) => {
    let sum = 0, weight = 0;
    return values.map((value) => {
      if (!finite(value)) return NaN;
      [sum, weight] = [part * sum + (1 - part) * value, part * weight + 1 - part];
      return sum / weight;
    });
  };
  const drawLogged = (chart) => {
    const [first, last] = wholeOf(chart), scale = state.powers ? (value) => (value > 0 ? Math.log10(value) : NaN) : (value) => value;
    const numbers = (values) => (values ?? []).map((value) => scale(value ?? NaN));
    const xs = chart.times.map((time, place) => Math.round(X * ((isOverSteps(chart) ? chart.steps[place] : time) - first) / ((last - first) || 1)));
    chart.seen = numbers(chart.values);
    [chart.low, chart.high] = state.powers ? spanOf(chart.seen) : [data.charts[chart.id].low, data.charts[chart.id].high];
    const y = (value) => Math.max(-FAR, Math.min(FAR, yOf(chart, value)));
    const through = (values) => {
      let path = "", pen = "M";
      values.forEach((value, place) => {
        if (finite(value)) path += `${pen}${xs[place]} ${y(value)}${pen === "M" ? "h0" : ""}`;
        pen = finite(value) ? "L" : "M";
      });
      return path;
    };
    const set = (name, path) => chart.plot.querySelector(name)?.setAttribute("d", path);
    set(".raw", through(chart.seen));
    chart.plot.querySelector(".raw")?.classList.toggle("faint", state.smooth > 0);
    chart.plot.querySelector(".smooth")?.remove();
    if (state.smooth > 0) {
      const even = smoothed(numbers(chart.values), state.smooth);
      chart.plot.querySelector(".raw").after(make("path", { class: "line s0 smooth", d: through(even) }, chart.plot));
    }
    const low = numbers(chart.least), high = numbers(chart.greatest);
    let area = "", run = [];
    for (let place = 0; place <= low.length; place++) {
      if (place < low.length && finite(low[place]) && finite(high[place])) { run.push(place); continue; }
      if (run.length > 1) area += `M${run.map((each) => `${xs[each]} ${y(high[each])}`).join("L")}L${run.reverse().map((each) => `${xs[each]} ${y(low[each])}`).join("L")}Z`;
      run = [];
    }
    set(".band", area);
    set(".odd", (chart.odd ?? []).map((place) => `M${place ? xs[place - 1] : Math.min(0, xs[0])} 0H${xs[place] + 20}V${Y}H${place ? xs[place - 1] : Math.min(0, xs[0])}Z`).join(""));
    for (const line of chart.plot.querySelectorAll(".mark")) {
      const mine = data.marks.filter(([, kind]) => line.classList.contains(kind));
      line.setAttribute("d", mine.map(([at]) => `M${Math.round(X * (placeIn(chart, at) - first) / ((last - first) || 1))} ${-FAR}V${FAR}`).join(""));
    }
  };
  const drawAllLogged = () => { logged.forEach(drawLogged); draw(); };

  const draw = () => {
    charts.forEach(frame);
    find("reset").disabled = isWhole();
    point();
  };
  const zoom = (low, high) => {
    const least = Math.min(seconds, Math.max(0.5, 4 * seconds / Math.max(bins, 4)));
    const long = Math.min(seconds, Math.max(least, high - low)), begin = Math.max(0, Math.min((low + high - long) / 2, seconds - long));
    [state.low, state.high] = [begin, Math.min(seconds, begin + long)];
    draw();
  };
  const zoomBy = (factor) => {
    const at = state.at ?? (state.low + state.high) / 2, long = (state.high - state.low) * factor;
    zoom(at - long / 2, at + long / 2);
  };
  const reset = () => { [state.low, state.high] = [0, seconds]; draw(); };

  // One rank ------------------------------------------------------------------------------------------------------------

  const yOf = (chart, value) => Math.round(Y * (chart.high - value) / ((chart.high - chart.low) || 1));
  const showRank = () => {
    for (const chart of charts) {
      if (chart.kind === "ranks") {
        chart.plot.querySelector(".one")?.remove();
        chart.svg.classList.toggle("dim", state.rank >= 0);
        const key = chart.figure.querySelector(".key-one");
        key.hidden = state.rank < 0 || ranks.length <= data.lines;
        if (state.rank < 0) continue;
        key.querySelector("span").textContent = `rank ${ranks[state.rank]}`;
        let path = "", pen = "M";
        for (let bin = 0; bin < bins; bin++) {
          const value = chart.rows[state.rank * bins + bin];
          if (bin && begins[bin] !== ends[bin - 1]) pen = "M"; // another start
          if (finite(value)) path += `${pen}${Math.round(X * middle[bin] / seconds)} ${yOf(chart, value)}`;
          pen = finite(value) ? "L" : "M";
        }
        make("path", { class: "line one", d: path }, chart.plot);
      } else if (chart.kind === "stack") {
        chart.drawn ??= chart.names.map(([name]) => chart.plot.querySelector(`.${name}`).getAttribute("d"));
        const tops = new Float64Array(bins);
        chart.names.forEach(([name], layer) => {
          const path = chart.plot.querySelector(`.${name}`);
          if (state.rank < 0) { path.setAttribute("d", chart.drawn[layer]); return; }
          let stairs = "", end = null;
          for (let bin = 0; bin < bins; bin++) {
            tops[bin] += partOf(chart, layer, state.rank, bin);
            const left = Math.round(X * begins[bin] / seconds), right = Math.round(X * ends[bin] / seconds);
            if (left !== end) stairs += `${stairs && `V${Y}Z`}M${left} ${Y}`;
            stairs += `V${yOf(chart, tops[bin])}H${right}`;
            end = right;
          }
          path.setAttribute("d", stairs && `${stairs}V${Y}Z`);
        });
        chart.figure.querySelector("figcaption p").textContent = state.rank < 0 ? "the mean of all ranks" : `rank ${ranks[state.rank]}`;
      }
    }
    point();
  };
  const partOf = (chart, layer, rank, bin) => chart.bytes[(layer * ranks.length + rank) * bins + bin] / 255;

  // Values at a moment ---------------------------------------------------------------------------------------------------

  const nearest = (times, at) => {
    let low = 0, high = times.length;
    while (low < high) { const half = (low + high) >> 1; if (times[half] < at) low = half + 1; else high = half; }
    return low > 0 && (low === times.length || at - times[low - 1] <= times[low] - at) ? low - 1 : low;
  };
  const binAt = (at) => {
    const bin = nearest(middle, at);
    return [bin - 1, bin, bin + 1].find((each) => each >= 0 && each < bins && begins[each] <= at && at < ends[each]) ?? bin;
  };
  const column = (rows, bin) => Array.from({ length: ranks.length }, (_, rank) => rows[rank * bins + bin]);
  const greatest = (values) => values.reduce((best, value, place) => (value > (values[best] ?? -1) ? place : best), 0);

  const valuesOf = (chart, at) => {
    const bin = binAt(at), { unit } = chart, found = [];
    if (chart.kind === "ranks") {
      const values = column(chart.rows, bin);
      if (ranks.length <= data.lines) values.forEach((value, rank) => found.push([`s${rank}`, shown(value, unit), `rank ${ranks[rank]}`]));
      else {
        const known = values.filter(finite).sort((a, b) => a - b), most = greatest(values);
        const at4 = (part) => { const place = part * (known.length - 1), low = Math.floor(place); return known[low] + (place - low) * ((known[low + 1] ?? known[low]) - known[low]); };
        if (known.length) {
          found.push(["s0", shown(at4(0.5), unit), "median"], ["half", `${shown(at4(0.25), unit)} to ${shown(at4(0.75), unit)}`, "middle half"]);
          found.push(["all", `${shown(known[0], unit)} to ${shown(known.at(-1), unit)}`, "all ranks"], ["most", `rank ${ranks[most]}, ${shown(values[most], unit)}`, "most"]);
        }
        if (finite(values[chart.longest])) found.push(["s1", shown(values[chart.longest], unit), `rank ${ranks[chart.longest]}`]);
        if (state.rank >= 0) found.push(["one", shown(values[state.rank], unit), `rank ${ranks[state.rank]}`]);
      }
    } else if (chart.kind === "stack") {
      const step = charts.find((each) => each.id === "step");
      const rank = (each) => (state.rank < 0 ? each.reduce((sum, value) => sum + value, 0) / each.length : each[state.rank]);
      const long = rank(column(step.rows, bin));
      chart.names.forEach(([name, title], layer) => {
        const part = rank(ranks.map((_, each) => partOf(chart, layer, each, bin)));
        found.push([name, shown(part, "share") + (finite(long) && part > 0.005 ? ` · ${shown(part * long, "seconds")}` : ""), title]);
      });
    } else if (chart.kind === "heat") {
      const values = ranks.map((_, rank) => chart.bytes[rank * bins + bin] / 255), most = greatest(values);
      found.push(["most", `rank ${ranks[most]}, ${shown(values[most], unit)}`, "most"]);
      const row = state.row?.id === chart.id ? state.row.rank : state.rank;
      found.push(["ramp", row >= 0 ? `rank ${ranks[row]}: ${shown(values[row], unit)}` : "", ""]);
    } else if (chart.kind === "metric") {
      const place = nearest(chart.times, at), value = chart.values[place] ?? NaN;
      const isOdd = chart.odd?.includes(place), read = isOdd && !finite(value) ? "NaN or infinite" : shown(value, "number");
      found.push(["s0", chart.times.length ? `${read} at step ${chart.steps[place].toLocaleString("en-US")}` : "", ""]);
    } else if (chart.kind === "single") {
      found.push(["s0", shown(chart.values[bin] ?? NaN, unit), ""]);
    }
    return found;
  };

  const point = () => {
    const { at } = state, inside = at !== null && at >= state.low && at <= state.high;
    for (const chart of charts) {
      const x = inside ? xOf(chart, at) : 0;
      chart.cursor.setAttribute("visibility", inside ? "visible" : "hidden");
      chart.cursor.setAttribute("x1", x); chart.cursor.setAttribute("x2", x);
      chart.outputs.forEach((output) => { output.textContent = ""; });
      if (at === null) continue;
      for (const [key, text] of valuesOf(chart, at)) { const output = chart.outputs.get(key); if (output) output.textContent = text; }
    }
    const clock = at === null ? "" : new Date((data.began + at) * 1000).toLocaleTimeString();
    find("moment").textContent = at === null ? "" : `${moment(at, 0.1)} (${clock})`;
  };
  const say = (chart) => {
    const values = valuesOf(chart, state.at).filter(([, text]) => text).map(([, text, title]) => `${title} ${text}`.trim());
    find("said").textContent = `${moment(state.at, 0.1)}, ${chart.title}: ${values.slice(0, 14).join(", ")}`;
  };

  // Pointer and keyboard -------------------------------------------------------------------------------------------------

  // Where the pointer is in the plot, from 0 to 1 each way. (The plot's own box has what is cut off as well.)
  const placeOf = (chart, event) => {
    const box = chart.svg.getBoundingClientRect(), scale = (LEFT + chart.width + RIGHT) / box.width;
    return [((event.clientX - box.left) * scale - LEFT) / chart.width, ((event.clientY - box.top) * scale - ABOVE) / chart.height];
  };
  const momentAt = (chart, event) => {
    const [low, high] = viewOf(chart), place = low + Math.max(0, Math.min(1, placeOf(chart, event)[0])) * (high - low);
    return isOverSteps(chart) ? between(way.steps, way.times, place) : place;
  };
  for (const chart of charts) {
    const { svg } = chart;
    let from = null;
    svg.setAttribute("tabindex", "0");
    svg.setAttribute("aria-describedby", "help");
    svg.addEventListener("pointermove", (event) => {
      state.at = momentAt(chart, event);
      if (chart.kind === "heat") {
        const row = Math.floor(ranks.length * placeOf(chart, event)[1]);
        state.row = row >= 0 && row < ranks.length ? { id: chart.id, rank: row } : null;
      }
      if (from !== null) {
        const [left, right] = [from, state.at].map((each) => xOf(chart, each)).sort((a, b) => a - b);
        chart.chosen.setAttribute("x", left); chart.chosen.setAttribute("width", right - left);
      }
      point();
    });
    svg.addEventListener("pointerdown", (event) => {
      if (event.button !== 0 || event.pointerType === "touch") return;
      from = momentAt(chart, event);
      svg.setPointerCapture(event.pointerId);
    });
    const release = (event) => {
      if (from === null) return;
      const [low, high] = [from, momentAt(chart, event)].sort((a, b) => a - b);
      from = null;
      chart.chosen.setAttribute("width", 0);
      if (event.type === "pointerup" && xOf(chart, high) - xOf(chart, low) > 6) zoom(low, high);
    };
    svg.addEventListener("pointerup", release);
    svg.addEventListener("pointercancel", release);
    svg.addEventListener("pointerleave", () => { if (from === null) { state.at = state.row = null; point(); } });
    svg.addEventListener("dblclick", reset);
    svg.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.altKey || event.metaKey) return;
      const by = event.shiftKey ? 10 : 1, { times } = chart;
      const move = (place) => {
        state.at = times[Math.max(0, Math.min(times.length - 1, place))] ?? 0;
        const long = state.high - state.low;
        if (state.at < state.low) zoom(state.at, state.at + long);
        else if (state.at > state.high) zoom(state.at - long, state.at);
        point(); say(chart);
      };
      const here = nearest(times, state.at ?? state.low), keys = {
        ArrowLeft: () => move(here - by), ArrowRight: () => move(state.at === null ? here : here + by),
        Home: () => move(nearest(times, state.low)), End: () => move(nearest(times, state.high)),
        "+": () => zoomBy(0.5), "=": () => zoomBy(0.5), "-": () => zoomBy(2), 0: reset, Escape: reset,
      };
      if (event.key in keys) { event.preventDefault(); keys[event.key](); }
    });
  }

  find("rank").addEventListener("change", (event) => {
    state.rank = event.target.value === "" ? -1 : ranks.indexOf(Number(event.target.value));
    showRank();
  });
  find("in").addEventListener("click", () => zoomBy(0.5));
  find("out").addEventListener("click", () => zoomBy(2));
  find("reset").addEventListener("click", reset);
  const theme = find("theme"), root = document.documentElement, prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ?? (prefersDark.matches ? "dark" : "light")) === "dark";
  const showTheme = () => { theme.setAttribute("aria-pressed", isDark()); };
  theme.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; showTheme(); });
  prefersDark.addEventListener("change", showTheme);

  find("tools").hidden = find("help").hidden = false;
  root.classList.add("live");
  if (logged.length) {
    find("logged").hidden = false;
    find("axis").addEventListener("change", (event) => { state.overSteps = event.target.value === "steps"; drawAllLogged(); });
    find("smooth").addEventListener("input", (event) => { state.smooth = Number(event.target.value); drawAllLogged(); });
    find("powers").addEventListener("change", (event) => { state.powers = event.target.checked; drawAllLogged(); });
  }
  window.addEventListener("resize", () => { layOut(); draw(); });
  showTheme();
  layOut();
  draw();
})();
