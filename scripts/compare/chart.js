// The losses of several runs and of means over seeds, drawn from data that the page holds: axes to choose,
// values under the pointer.
"use strict";

// ---- arithmetic

// Round places of an axis, at most about `most`: 1, 2, 5 times a power of ten; of a logarithmic one over
// several decades the powers alone.
function ticks(low, high, isLog, most) {
  if (!(high > low)) return [low];
  const found = [];
  if (isLog && low > 0 && high / low >= 10) {
    const decades = Math.log10(high / low);
    const factors = decades > most ? [1] : decades > most / 3 ? [1, 3] : [1, 2, 5];
    const stride = Math.max(1, Math.ceil(decades / most));
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += stride)
      for (const factor of factors) {
        const value = factor * 10 ** power;
        if (value >= low && value <= high) found.push(value);
      }
    return found;
  }
  const rough = (high - low) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find(factor => factor * power >= rough * (1 - 1e-9));
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high * (1 + 1e-12); index++)
    found.push(index * step);
  return found;
}

// 1.5M, 2e+18, 0.25
function shortNumber(value) {
  const units = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "K"]];
  if (Math.abs(value) >= 1e15) return value.toExponential(2).replace(/\.?0+e/, "e");
  for (const [unit, letter] of units)
    if (Math.abs(value) >= unit) return Number((value / unit).toPrecision(4)) + letter;
  return String(Number(value.toPrecision(4)));
}

// The loss of a curve at x, on the line between its points; null outside of them and beside a missing one.
function valueAt(xs, ys, x) {
  if (!xs.length || x < xs[0] || x > xs[xs.length - 1]) return null;
  let low = 0, high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle; else high = middle;
  }
  if (ys[low] === null || ys[high] === null) return null;
  const share = high === low || xs[high] === xs[low] ? 0 : (x - xs[low]) / (xs[high] - xs[low]);
  return ys[low] + share * (ys[high] - ys[low]);
}

// [least, most] of what is shown. share: of each curve's points that are left out at its beginning.
function range(runs, share) {
  let low = Infinity, high = -Infinity;
  for (const run of runs)
    run.loss.forEach((value, index) => {
      if (value === null || index < share * run.loss.length) return;
      low = Math.min(low, value);
      high = Math.max(high, value);
    });
  if (low > high) return [0, 1];
  const margin = 0.05 * (high - low) + 1e-6;
  return [Math.max(low - margin, Math.min(low, 1e-3)), high + margin];
}

// ---- the drawing

function draw(place, data) {
  const units = Object.keys(data.runs[0].x);
  const choices = Object.assign({unit: units[0], logX: false, logY: false, fromStart: false,
    hidden: data.hidden}, readChoices());
  if (!units.includes(choices.unit)) choices.unit = units[0];

  const controls = place.appendChild(document.createElement("p"));
  const frame = place.appendChild(document.createElement("div"));
  const legend = place.appendChild(document.createElement("p"));
  const reading = place.appendChild(document.createElement("p"));
  frame.className = "frame";
  reading.className = "reading";
  legend.className = "legend";
  addControls();
  redraw();
  window.addEventListener("resize", redraw);

  function readChoices() {
    try {
      return JSON.parse(decodeURIComponent(location.hash.slice(1)));
    } catch {
      return {};
    }
  }

  function change(name, value) {
    choices[name] = value;
    history.replaceState(null, "", "#" + encodeURIComponent(JSON.stringify(choices)));
    redraw();
  }

  function addControls() {
    if (units.length > 1) {
      const select = controls.appendChild(document.createElement("select"));
      select.setAttribute("aria-label", "horizontal axis");
      for (const unit of units) select.add(new Option(unit, unit, false, unit === choices.unit));
      select.onchange = () => change("unit", select.value);
    }
    const boxes = {logX: "log " + (units.length > 1 ? "x" : units[0]), logY: "log loss",
      fromStart: "from the first step"};
    for (const [name, text] of Object.entries(boxes)) {
      const label = controls.appendChild(document.createElement("label"));
      const box = label.appendChild(document.createElement("input"));
      box.type = "checkbox";
      box.checked = choices[name];
      box.onchange = () => change(name, box.checked);
      label.append(" " + text);
    }
  }

  function redraw() {
    const width = Math.max(280, frame.clientWidth), height = Math.min(460, Math.max(240, 0.42 * width));
    const left = 52, right = 12, top = 10, bottom = 38;
    const shown = data.runs.filter(run => !choices.hidden.includes(run.name));

    // scales
    const xs = shown.flatMap(run => run.x[choices.unit]).filter(x => !choices.logX || x > 0);
    const lowX = xs.length ? xs.reduce((one, other) => Math.min(one, other)) : 0;
    const highX = xs.length ? xs.reduce((one, other) => Math.max(one, other)) : 1;
    const [lowY, highY] = range(shown, choices.fromStart ? 0 : data.hidden_share);
    const warpX = choices.logX ? Math.log : Number, warpY = choices.logY ? Math.log : Number;
    const startX = choices.logX ? lowX : Math.min(0, lowX);
    const placeX = x => left + (width - left - right) * (warpX(x) - warpX(startX))
      / (warpX(highX) - warpX(startX) || 1);
    const placeY = y => height - bottom - (height - top - bottom) * (warpY(y) - warpY(lowY))
      / (warpY(highY) - warpY(lowY) || 1);

    // axes
    const svg = element("svg", {width, height, role: "img", "aria-label": "losses over " + choices.unit});
    const clip = svg.appendChild(element("clipPath", {id: "inside"}));
    clip.appendChild(element("rect", {x: left, y: top - 4, width: width - left - right,
      height: height - top - bottom + 8}));
    for (const value of ticks(lowY, highY, choices.logY, 6)) {
      svg.appendChild(element("line", {x1: left, x2: width - right, y1: placeY(value), y2: placeY(value),
        class: "grid"}));
      svg.appendChild(text(shortNumber(value), left - 6, placeY(value) + 4, "end"));
    }
    for (const value of ticks(startX, highX, choices.logX, Math.floor(width / 110))) {
      svg.appendChild(element("line", {x1: placeX(value), x2: placeX(value), y1: top, y2: height - bottom,
        class: "grid"}));
      svg.appendChild(text(shortNumber(value), placeX(value), height - bottom + 16, "middle"));
    }
    svg.appendChild(text(choices.unit, (left + width - right) / 2, height - 4, "middle"));

    // curves
    const curves = svg.appendChild(element("g", {"clip-path": "url(#inside)"}));
    for (const run of shown) {
      for (const points of bands(run)) {
        const corner = (x, y) => placeX(x).toFixed(1) + "," + placeY(y).toFixed(1);
        const below = points.map(([x, low]) => corner(x, low));
        const above = points.map(([x, , high]) => corner(x, high)).reverse();
        curves.appendChild(element("polygon", {fill: run.colour, "fill-opacity": data.band_opacity,
          points: [...below, ...above].join(" ")}));
      }
      let path = "", isDown = false;
      run.x[choices.unit].forEach((x, index) => {
        const loss = run.loss[index];
        const isThere = loss !== null && (!choices.logX || x > 0) && (!choices.logY || loss > 0);
        if (isThere) path += (isDown ? "L" : "M") + placeX(x).toFixed(1) + " " + placeY(loss).toFixed(1);
        isDown = isThere;
      });
      curves.appendChild(element("path", {d: path, stroke: run.colour, "stroke-dasharray": run.dash,
        fill: "none", "stroke-width": 1.6}));
      run.validation.x[choices.unit].forEach((x, index) => {
        const loss = run.validation.loss[index];
        if (loss === null || (choices.logX && x <= 0) || (choices.logY && loss <= 0)) return;
        const dot = curves.appendChild(element("circle", {cx: placeX(x), cy: placeY(loss), r: 3.5,
          fill: run.colour, class: "dot"}));
        dot.appendChild(element("title", {})).textContent = `${run.name}: validation ${loss.toFixed(4)}`;
      });
    }

    // under the pointer
    const cursor = svg.appendChild(element("line", {y1: top, y2: height - bottom, class: "cursor"}));
    cursor.style.display = "none";
    svg.onpointermove = event => {
      const share = (event.clientX - svg.getBoundingClientRect().left - left) / (width - left - right);
      if (share < 0 || share > 1) return;
      const warped = warpX(startX) + share * (warpX(highX) - warpX(startX));
      const x = choices.logX ? Math.exp(warped) : warped;
      cursor.style.display = "";
      cursor.setAttribute("x1", placeX(x));
      cursor.setAttribute("x2", placeX(x));
      show(x, shown);
    };
    svg.onpointerleave = () => {
      cursor.style.display = "none";
      show(highX, shown, true);
    };
    frame.replaceChildren(svg);
    drawLegend();
    show(highX, shown, true);
  }

  // Stretches [[x, low, high], ...] of the band of a mean, without the points that have none.
  function bands(run) {
    const found = [[]];
    (run.low || []).forEach((low, index) => {
      const x = run.x[choices.unit][index], high = run.high[index];
      const isThere = low !== null && (!choices.logX || x > 0) && (!choices.logY || high > 0);
      if (isThere) found[found.length - 1].push([x, choices.logY ? Math.max(low, 1e-3) : low, high]);
      else found.push([]);
    });
    return found.filter(points => points.length > 1);
  }

  function drawLegend() {
    legend.replaceChildren();
    for (const run of data.runs) {
      const button = legend.appendChild(document.createElement("button"));
      const isHidden = choices.hidden.includes(run.name);
      const line = element("svg", {width: 26, height: 10});
      line.appendChild(element("line", {x1: 0, x2: 26, y1: 5, y2: 5, stroke: run.colour,
        "stroke-width": 2, "stroke-dasharray": run.dash}));
      button.append(line, " " + run.name);
      button.setAttribute("aria-pressed", String(!isHidden));
      button.onclick = () => change("hidden", isHidden ? choices.hidden.filter(name => name !== run.name)
        : [...choices.hidden, run.name]);
    }
  }

  // The losses at x, the lowest first; at the end those of each run's last point.
  function show(x, shown, isEnd = false) {
    const values = shown.map(run => {
      const xs = run.x[choices.unit];
      return [valueAt(xs, run.loss, isEnd ? xs[xs.length - 1] : x), run.name];
    });
    const known = values.filter(([loss]) => loss !== null).sort((one, other) => one[0] - other[0]);
    const where = isEnd ? "at the end" : `at ${shortNumber(x)} ${choices.unit}`;
    reading.textContent = known.length ? where + ": " + known.map(([loss, name]) =>
      `${name} ${loss.toFixed(4)}`).join(" · ") : where + ": no loss";
  }
}

function element(name, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function text(words, x, y, anchor) {
  const made = element("text", {x, y, "text-anchor": anchor});
  made.textContent = words;
  return made;
}

if (typeof document !== "undefined")
  draw(document.getElementById("chart"), JSON.parse(document.getElementById("curves").textContent));
