"use strict";
// Three magnifications: the map (one cell = one page), the page (rows x bytes), the bytes around one byte.
// Everything is drawn from runs of states; a page with the same runs as another one is decoded and measured once.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const element = (id) => document.getElementById(id);
  const make = (tag, text, className) => {
    const node = document.createElement(tag);
    if (text !== undefined) node.textContent = text;
    if (className) node.className = className;
    return node;
  };
  const number = (value) => value.toLocaleString("en-US");

  // ---- states: number, letter, colours, texture -------------------------------------------------------------
  const letters = data.states.map((state) => state[0]).join("");
  const names = data.states.map((state) => state[1]);
  const [RESTORED, COMPUTED, POISON, FOREIGN, STRAY, CANARY, NULL, UNKNOWN] = data.states.keys();
  const isWrong = (state) => state === FOREIGN || state === STRAY;
  const STACK = [RESTORED, COMPUTED, CANARY, NULL, UNKNOWN, POISON]; // from top to bottom of a cell
  const scale = window.devicePixelRatio || 1;
  let paints = []; // colour and texture
  let flats = []; // colour alone, under a letter

  // A texture per state, so that none depends on colour alone: [x, y, width, height] of the ink in a 6 x 6 tile.
  const TEXTURES = {
    [COMPUTED]: [[0, 2, 6, 1]],
    [POISON]: [[0, 5, 1, 1], [1, 4, 1, 1], [2, 3, 1, 1], [3, 2, 1, 1], [4, 1, 1, 1], [5, 0, 1, 1]],
    [FOREIGN]: [[0, 0, 1, 1], [1, 1, 1, 1], [2, 2, 1, 1], [3, 3, 1, 1], [4, 4, 1, 1], [5, 5, 1, 1],
      [5, 1, 1, 1], [4, 2, 1, 1], [2, 4, 1, 1], [1, 5, 1, 1]],
    [STRAY]: [[0, 0, 1, 6], [3, 0, 1, 6]],
    [CANARY]: [[1, 1, 2, 2], [4, 4, 2, 2]],
    [NULL]: [[2, 2, 2, 2]],
    [UNKNOWN]: [[0, 0, 1, 1]],
  };

  function mixPaints(ctx) {
    const style = getComputedStyle(document.documentElement);
    flats = names.map((name) => style.getPropertyValue(`--${name}`).trim());
    paints = names.map((name, state) => {
      const tile = make("canvas");
      tile.width = tile.height = 6;
      const pen = tile.getContext("2d");
      pen.fillStyle = flats[state];
      pen.fillRect(0, 0, 6, 6);
      pen.fillStyle = style.getPropertyValue(`--${name}-ink`).trim();
      for (const rect of TEXTURES[state] || []) pen.fillRect(...rect);
      return ctx.createPattern(tile, "repeat");
    });
  }

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function sized(canvas, width, height) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const ctx = canvas.getContext("2d");
    ctx.setTransform(scale, 0, 0, scale, 0, 0);
    ctx.font = "11px system-ui, sans-serif";
    ctx.textBaseline = "middle";
    return ctx;
  }

  // ---- runs --------------------------------------------------------------------------------------------------
  const decoded = new Map();
  /** Runs of one pattern: where each ends [B], its state, and the bytes of every state. */
  function runsOf(pattern) {
    if (!decoded.has(pattern)) {
      const ends = [], states = [], totals = new Float64Array(names.length);
      let end = 0;
      for (const [, letter, digits] of data.patterns[pattern].matchAll(/([A-Z])([0-9a-z]+)/g)) {
        const state = letters.indexOf(letter), length = parseInt(digits, 36);
        end += length;
        totals[state] += length;
        ends.push(end);
        states.push(state);
      }
      decoded.set(pattern, { ends, states, totals, length: end });
    }
    return decoded.get(pattern);
  }

  const strips = new Map();
  /** Bytes of every state behind each of `width` pixel columns of a page. */
  function stripOf(pattern, width) {
    const key = `${pattern} ${width}`;
    if (!strips.has(key)) {
      const { ends, states, length } = runsOf(pattern);
      const cover = new Float32Array(width * names.length);
      let start = 0;
      ends.forEach((end, run) => {
        const from = (start / length) * width, to = (end / length) * width;
        for (let x = Math.floor(from); x < Math.min(width, Math.ceil(to)); x++) {
          cover[x * names.length + states[run]] += Math.min(to, x + 1) - Math.max(from, x);
        }
        start = end;
      });
      strips.set(key, cover);
    }
    return strips.get(key);
  }

  /** One page as a strip: each pixel column a stack of its states; a wrong byte takes the whole column. */
  function drawStrip(ctx, left, top, width, height, pattern) {
    const cover = stripOf(pattern, width);
    const alone = (x) => {
      const at = cover.subarray(x * names.length, (x + 1) * names.length);
      if (at[FOREIGN] > 0) return FOREIGN;
      if (at[STRAY] > 0) return STRAY;
      return at.findIndex((share) => share > 0.999);
    };
    for (let x = 0; x < width;) {
      const state = alone(x);
      let end = x + 1;
      if (state >= 0) {
        while (end < width && alone(end) === state) end++;
        ctx.fillStyle = paints[state];
        ctx.fillRect(left + x, top, end - x, height);
      } else {
        let y = top;
        for (const part of STACK) {
          const share = cover[x * names.length + part];
          if (share <= 0) continue;
          const tall = part === POISON ? Math.max(2, top + height - y) : share * height;
          ctx.fillStyle = paints[part];
          ctx.fillRect(left + x, part === POISON ? top + height - Math.max(2, share * height) : y, 1, tall);
          y += share * height;
        }
      }
      x = end;
    }
    for (const state of [FOREIGN, STRAY]) { // one byte of many thousands must be wide enough to be seen
      for (let x = 0; x < width; x++) {
        if (cover[x * names.length + state] > 0 && alone(x) === state) {
          ctx.fillStyle = paints[state];
          ctx.fillRect(left + Math.max(0, Math.min(x - 1, width - 3)), top, Math.min(3, width), height);
        }
      }
    }
  }

  // ---- geometry of a resource ----------------------------------------------------------------------------------
  const offsets = (axes) => axes.reduce(
    (known, [count, stride]) => known.flatMap((offset) => Array.from({ length: count }, (_, i) => offset + i * stride)),
    [0]);
  const geometries = new Map();
  /** Page offsets of every row and of every byte of a row, the bytes no row owns, and the fields of a row. */
  function geometryOf(id) {
    if (!geometries.has(id)) {
      const resource = data.resources[id];
      const rows = offsets(resource.row_axes), bytes = offsets(resource.cell_axes);
      const owned = new Uint8Array(resource.page);
      for (const row of rows) for (const byte of bytes) owned[row + byte] = 1;
      const padding = [];
      for (let at = 0; at < owned.length; at++) if (!owned[at]) padding.push(at);
      const inner = resource.cell_axes.length ? resource.cell_axes[resource.cell_axes.length - 1][0] : 1;
      const bands = [];
      for (let cell = 0; cell * inner < bytes.length; cell++) {
        const head = bytes.length > inner ? ` h${cell}` : "";
        for (const [name, start, end] of resource.fields) {
          bands.push({ name: name + head, start: cell * inner + start, end: cell * inner + end });
        }
      }
      geometries.set(id, { rows, bytes, padding, bands, inner, heads: bytes.length / inner });
    }
    return geometries.get(id);
  }

  /** (row, byte in row) of a byte of the page, or null for padding. */
  function locate(id, pageByte) {
    const { rows, bytes } = geometryOf(id);
    const at = new Map(bytes.map((offset, byte) => [offset, byte]));
    for (let row = 0; row < rows.length; row++) {
      const byte = at.get(pageByte - rows[row]);
      if (byte !== undefined) return { row, byte };
    }
    return null;
  }

  const fieldAt = (geometry, byte) => geometry.bands.find((band) => byte >= band.start && byte < band.end)?.name ?? "row";

  function statesOf(resource, pattern) {
    const states = new Uint8Array(data.resources[resource].page).fill(UNKNOWN);
    if (pattern === undefined) return states;
    const runs = runsOf(pattern);
    let start = 0;
    runs.ends.forEach((end, run) => {
      states.fill(runs.states[run], start, end);
      start = end;
    });
    return states;
  }

  // ---- the map -------------------------------------------------------------------------------------------------
  let current = null; // { index, pages, views } of the byte map on show
  let selection = null; // { group, resource, block, column, byte }

  function columnsOf(map, group, rows) {
    const own = (map.groups[group.id] || []).map((block) => ({ block, own: true }));
    const known = new Set(own.map((column) => column.block));
    const others = new Set();
    for (let i = 0; i < map.pages.length; i += 3) {
      if (rows.has(map.pages[i]) && !known.has(map.pages[i + 1])) others.add(map.pages[i + 1]);
    }
    for (const target of data.targets) {
      if (target && target.map === current.index && target.group === group.id && !known.has(target.block)) others.add(target.block);
    }
    return own.concat([...others].sort((a, b) => a - b).map((block) => ({ block, own: false })));
  }

  function show(index) {
    const map = data.maps[index];
    const pages = new Map();
    for (let i = 0; i < map.pages.length; i += 3) pages.set(`${map.pages[i]} ${map.pages[i + 1]}`, map.pages[i + 2]);
    current = { index, pages, views: [] };
    closeZoom();
    element("groups").replaceChildren();
    for (const group of data.groups) {
      const columns = columnsOf(map, group, new Set(group.rows));
      if (columns.length && group.rows.length) current.views.push(mapView(group, columns));
    }
    element("which").value = String(index);
    readout(null);
  }

  const pageAt = (resource, block) => current.pages.get(`${resource} ${block}`);
  const targetsHere = () => data.targets.filter((target) => target && target.map === current.index);

  function mapView(group, columns) {
    const box = make("div", undefined, "group");
    const span = group.window ? ` of ${number(group.window)} tokens` : "";
    box.append(make("h3", `Group ${group.id} · ${group.kind}, ${number(group.block_size)} tokens per block, must be restored: ${group.rule}${span}`));
    if (group.pattern) box.append(make("p", `layers ${group.pattern}`, "muted"));
    const frame = make("div", undefined, "frame");
    const labels = make("div", undefined, "labels");
    const cells = make("div", undefined, "cells");
    const canvas = make("canvas");
    canvas.tabIndex = 0;
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `Byte map of group ${group.id}: ${group.rows.length} rows, ${columns.length} blocks. Move with the arrow keys.`);
    cells.append(canvas);
    frame.append(labels, cells);
    box.append(frame);
    element("groups").append(box);
    const view = { group, columns, frame, labels, cells, canvas, marks: [] };
    drawMap(view);
    canvas.addEventListener("mousemove", (event) => readout(cellAt(view, event)));
    canvas.addEventListener("mouseleave", () => readout(selection));
    canvas.addEventListener("click", (event) => {
      const cell = cellAt(view, event);
      if (cell) select(cell, true);
    });
    canvas.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
      if (!step) return;
      event.preventDefault();
      const inside = selection && selection.group === group;
      const column = inside ? clamp(selection.column + step[0], 0, columns.length - 1) : 0;
      const row = inside ? clamp(group.rows.indexOf(selection.resource) + step[1], 0, group.rows.length - 1) : 0;
      select(cellOf(view, column, row), false);
    });
    return view;
  }

  const clamp = (value, low, high) => Math.max(low, Math.min(high, value));
  const cellOf = (view, column, row) => ({
    group: view.group, resource: view.group.rows[row], column, own: view.columns[column].own, block: view.columns[column].block,
  });

  function drawMap(view) {
    const { group, columns, canvas } = view;
    const count = group.rows.length;
    const narrow = element("groups").clientWidth < 500;
    const longest = Math.max(...group.labels.map((label) => label.length));
    const labelWidth = clamp(longest * 7 + 30, 34, narrow ? 90 : 190);
    const owned = columns.filter((column) => column.own).length;
    const apart = owned < columns.length && owned > 0 ? 14 : 0;
    const room = element("groups").clientWidth - labelWidth - 6 - apart;
    const wide = clamp(Math.floor(room / columns.length), 12, 110);
    const high = count <= 4 ? 34 : count <= 12 ? 26 : count <= 40 ? 18 : 13;
    const heads = columns.map((column) => String(column.block));
    const upright = Math.max(...heads.map((head) => head.length)) * 7 + 4 > wide;
    const top = upright ? Math.max(...heads.map((head) => head.length)) * 7 + 22 : 36;
    Object.assign(view, { labelWidth, wide, high, top, apart, owned });
    const width = Math.max(140, columns.length * wide + apart + 6), height = top + count * high + 4;
    const ctx = sized(canvas, width, height);
    if (!paints.length) mixPaints(ctx);

    ctx.fillStyle = colour("--muted");
    ctx.textAlign = "left";
    ctx.fillText("block id, in token order", 2, 8);
    if (apart && width > 260) {
      ctx.textAlign = "right";
      ctx.fillText("other blocks", width - 4, 8);
    }
    ctx.fillStyle = colour("--ink");
    heads.forEach((head, column) => {
      const x = leftOf(view, column) + (wide - 2) / 2;
      if (upright) {
        ctx.save();
        ctx.translate(x, top - 4);
        ctx.rotate(-Math.PI / 2);
        ctx.textAlign = "left";
        ctx.fillText(head, 0, 0);
        ctx.restore();
      } else {
        ctx.textAlign = "center";
        ctx.fillText(head, x, top - 10);
      }
    });

    const bad = new Set();
    const failing = new Set(targetsHere().map((target) => `${target.resource} ${target.block}`));
    group.rows.forEach((resource, row) => {
      columns.forEach(({ block }, column) => {
        const x = leftOf(view, column), y = top + row * high, w = wide - 2, h = high - 2;
        const pattern = pageAt(resource, block);
        if (pattern === undefined) {
          ctx.fillStyle = paints[block === 0 ? NULL : UNKNOWN];
          ctx.fillRect(x, y, w, h);
        } else {
          drawStrip(ctx, x, y, w, h, pattern);
        }
        const totals = pattern === undefined ? null : runsOf(pattern).totals;
        const wrong = totals && (totals[FOREIGN] ? FOREIGN : totals[STRAY] ? STRAY : -1);
        if (totals && wrong >= 0) {
          ctx.strokeStyle = colour("--alarm");
          ctx.lineWidth = 2;
          ctx.strokeRect(x + 1, y + 1, w - 2, h - 2);
        }
        const sign = totals === null ? (block === 0 ? NULL : -1) : wrong >= 0 ? wrong : totals[POISON] && (failing.has(`${resource} ${block}`) || totals[POISON] > 0.5 * runsOf(pattern).length) ? POISON : totals[NULL] > 0.5 * runsOf(pattern).length ? NULL : -1;
        if (sign >= 0 && w >= 10 && h >= 11) badge(ctx, x + w / 2, y + h / 2, sign);
        if (wrong >= 0 && totals || failing.has(`${resource} ${block}`)) bad.add(row);
      });
    });

    view.labels.style.width = `${labelWidth}px`;
    view.labels.style.height = `${height}px`;
    view.labels.replaceChildren(...group.labels.map((label, row) => {
      const node = make("div", bad.has(row) ? `▸ ${label}` : label, bad.has(row) ? "bad" : "");
      node.title = data.resources[group.rows[row]].layer;
      node.style.cssText = `top:${top + row * high - 1}px;height:${high}px;line-height:${high}px;font-size:${clamp(high - 3, 9, 12)}px`;
      return node;
    }));
    markMap(view);
  }

  const leftOf = (view, column) => 4 + column * view.wide + (column >= view.owned ? view.apart : 0);

  function badge(ctx, x, y, state) {
    ctx.font = "bold 11px system-ui, sans-serif";
    ctx.textAlign = "center";
    ctx.lineWidth = 3;
    ctx.strokeStyle = colour("--card");
    ctx.fillStyle = colour(isWrong(state) ? "--fail" : "--ink");
    const text = state === NULL ? "∅" : letters[state];
    ctx.strokeText(text, x, y + 0.5);
    ctx.fillText(text, x, y + 0.5);
    ctx.font = "11px system-ui, sans-serif";
  }

  function place(parent, className, left, top, width, height) {
    const node = make("div", undefined, className);
    node.style.cssText = `left:${left}px;top:${top}px;width:${width}px;height:${height}px`;
    parent.append(node);
    return node;
  }

  function markMap(view) {
    view.marks.forEach((mark) => mark.remove());
    view.marks = [];
    const at = (cell, className) => {
      const row = view.group.rows.indexOf(cell.resource);
      const column = cell.column ?? view.columns.findIndex(({ block }) => block === cell.block);
      if (row < 0 || column < 0) return;
      const out = className === "mark" ? 4 : 1;
      const left = leftOf(view, column) - out, top = view.top + row * view.high - out;
      view.marks.push(place(view.cells, className, left, top, view.wide - 2 + 2 * out, view.high - 2 + 2 * out));
    };
    const seen = new Set();
    for (const target of targetsHere()) {
      const key = `${target.resource} ${target.block}`;
      if (target.group === view.group.id && !seen.has(key)) at(target, "mark");
      seen.add(key);
    }
    if (selection && selection.group === view.group) at(selection, "mark chosen");
  }

  function cellAt(view, event) {
    const box = view.canvas.getBoundingClientRect();
    let x = event.clientX - box.left - 4;
    if (x >= view.owned * view.wide) x -= view.apart;
    const column = Math.floor(x / view.wide), row = Math.floor((event.clientY - box.top - view.top) / view.high);
    if (column < 0 || column >= view.columns.length || row < 0 || row >= view.group.rows.length) return null;
    return cellOf(view, column, row);
  }

  const tokensOf = (cell) => {
    if (!cell.own) return "not a block of this request";
    const size = cell.group.block_size;
    return `tokens ${number(cell.column * size)}–${number((cell.column + 1) * size - 1)}`;
  };

  function readout(cell) {
    if (!cell) {
      const failing = targetsHere().length;
      element("readout").textContent = failing
        ? `${failing === 1 ? "1 finding starts" : `${failing} findings start`} in the outlined cells.`
        : "No finding points into this byte map.";
      return;
    }
    const pattern = pageAt(cell.resource, cell.block);
    const resource = data.resources[cell.resource];
    const shares = pattern === undefined ? ["not recorded"] : names
      .map((name, state) => [name, runsOf(pattern).totals[state]])
      .filter(([, bytes]) => bytes)
      .map(([name, bytes]) => `${name} ${number(bytes)} B`);
    element("readout").textContent = `${resource.layer} · block ${cell.block} · ${tokensOf(cell)} · ${shares.join(", ")}`;
  }

  // ---- one page ------------------------------------------------------------------------------------------------
  function closeZoom() {
    selection = null;
    element("zoom").hidden = true;
    element("zoom").parentElement.classList.remove("open");
  }

  /** The byte worth looking at first: a finding's, else the first wrong one, else the first. */
  function firstByte(cell, states) {
    const target = targetsHere().find((t) => t.resource === cell.resource && t.block === cell.block);
    return target ? target.byte : Math.max(0, states.findIndex(isWrong));
  }

  function select(cell, reveal) {
    const states = statesOf(cell.resource, pageAt(cell.resource, cell.block));
    const byte = clamp(cell.byte ?? firstByte(cell, states), 0, states.length - 1);
    selection = { ...cell, byte, states };
    const zoom = element("zoom");
    const opened = zoom.hidden;
    zoom.hidden = false;
    zoom.parentElement.classList.add("open");
    if (opened) current.views.forEach(drawMap); // the map shares its width with the page from now on
    current.views.forEach(markMap);
    readout(selection);
    drawZoom();
    if (reveal) zoom.scrollIntoView({ block: "nearest", behavior: "smooth" });
  }

  function drawZoom() {
    const zoom = element("zoom");
    const resource = data.resources[selection.resource];
    zoom.replaceChildren();
    const close = make("button", "✕", "close");
    close.type = "button";
    close.setAttribute("aria-label", "Close the page view");
    close.addEventListener("click", () => { closeZoom(); current.views.forEach(drawMap); });
    zoom.append(close, make("h3", resource.layer),
      make("p", `block ${selection.block} · ${tokensOf(selection)} · page of ${number(resource.page)} bytes · ${resource.dtype}`, "muted"));
    const page = pageView(zoom);
    const bytes = bytesView(zoom);
    const facts = make("dl");
    zoom.append(facts);
    const refresh = () => { page.mark(); bytes.draw(); describeByte(facts); };
    page.choose = bytes.choose = (byte) => { selection.byte = byte; refresh(); };
    refresh();
  }

  /** Rows x bytes of the page in one canvas; long rows are folded, many rows share a line. */
  function pageView(parent) {
    const { resource: id, states } = selection;
    const { rows, bytes, padding, bands } = geometryOf(id);
    const folds = rows.length <= 8 && bytes.length > 2048 ? Math.min(Math.ceil(bytes.length / 1024), Math.floor(64 / rows.length)) : 1;
    const span = Math.ceil(bytes.length / folds);
    const perLine = Math.ceil((rows.length * folds) / 256);
    const lines = Math.ceil((rows.length * folds) / perLine);
    const left = 58, top = folds === 1 ? 34 : 18;
    const cells = make("div", undefined, "cells");
    const canvas = make("canvas");
    cells.append(canvas);
    parent.append(cells);
    const width = Math.max(120, Math.floor(cells.clientWidth) - left - 4);
    const high = clamp(Math.floor(320 / lines), 2, 18);
    const below = padding.length ? 24 : 0;
    const ctx = sized(canvas, left + width + 4, top + lines * high + below + 4);
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", "Rows and bytes of the page");

    ctx.fillStyle = colour("--muted");
    ctx.textAlign = "right";
    ctx.fillText(data.resources[id].tokens_per_row ? "row" : "state", left - 6, top - 8);
    if (folds === 1) drawBands(ctx, bands, left, width, bytes.length);
    else {
      ctx.textAlign = "left";
      ctx.fillText(`${number(span)} bytes per line`, left, 8);
    }
    const every = Math.max(1, Math.ceil(14 / high));
    const seen = new Uint32Array(names.length);
    for (let line = 0; line < lines; line++) {
      const y = top + line * high;
      if (line % every === 0) {
        ctx.fillStyle = colour("--muted");
        ctx.textAlign = "right";
        const start = line * perLine;
        const label = folds === 1 ? number(start) : line % folds === 0 || rows.length === 1 ? `+${number((start % folds) * span)}` : "";
        ctx.fillText(label, left - 6, y + high / 2);
      }
      let run = 0, runState = -1;
      for (let x = 0; x <= width; x++) {
        const state = x === width ? -1 : worst(line, x);
        if (state !== runState) {
          if (runState >= 0) {
            ctx.fillStyle = paints[runState];
            // A wrong byte is at least three pixels wide.
            const least = isWrong(runState) ? Math.max(x - run, 3) : x - run;
            ctx.fillRect(left + Math.min(run, width - least), y, least, high > 4 ? high - 1 : high);
          }
          run = x;
          runState = state;
        }
      }
    }
    function worst(line, x) {
      seen.fill(0);
      const from = Math.floor((x / width) * span), to = Math.max(from + 1, Math.floor(((x + 1) / width) * span));
      for (let unit = line * perLine; unit < Math.min((line + 1) * perLine, rows.length * folds); unit++) {
        const row = Math.floor(unit / folds), shift = (unit % folds) * span;
        for (let byte = from + shift; byte < Math.min(to + shift, bytes.length); byte++) seen[states[rows[row] + bytes[byte]]]++;
      }
      for (const state of [FOREIGN, STRAY, POISON]) if (seen[state]) return state;
      const most = Math.max(...seen);
      return most ? seen.indexOf(most) : -1;
    }
    const padTop = top + lines * high + 6;
    if (padding.length) {
      ctx.fillStyle = colour("--muted");
      ctx.textAlign = "right";
      ctx.fillText("padding", left - 6, padTop + 8);
      for (let x = 0; x < width; x++) {
        const part = padding.slice(Math.floor((x / width) * padding.length), Math.max(Math.floor((x / width) * padding.length) + 1, Math.floor(((x + 1) / width) * padding.length)));
        const state = [FOREIGN, STRAY, POISON].find((bad) => part.some((at) => states[at] === bad)) ?? states[part[0]];
        ctx.fillStyle = paints[state];
        ctx.fillRect(left + x, padTop, isWrong(state) ? 3 : 1, 14);
      }
    }

    const view = { choose: null };
    let mark = null;
    view.mark = () => {
      mark?.remove();
      const at = locate(id, selection.byte);
      if (!at) {
        const x = left + (padding.indexOf(selection.byte) / padding.length) * width;
        mark = place(cells, "mark", x - 6, padTop - 4, 14, 22);
        return;
      }
      const line = Math.floor((at.row * folds + Math.floor(at.byte / span)) / perLine);
      const x = left + ((at.byte % span) / span) * width;
      mark = place(cells, "mark", x - 6, top + line * high - 5, 14, high + 9);
    };
    canvas.addEventListener("click", (event) => {
      const box = canvas.getBoundingClientRect();
      const share = clamp((event.clientX - box.left - left) / width, 0, 0.999999);
      const y = event.clientY - box.top;
      if (padding.length && y >= padTop - 2) return view.choose(padding[Math.floor(share * padding.length)]);
      const unit = clamp(Math.floor((y - top) / high), 0, lines - 1) * perLine;
      const row = Math.floor(unit / folds), byte = Math.floor(share * span) + (unit % folds) * span;
      return view.choose(rows[row] + bytes[Math.min(byte, bytes.length - 1)]);
    });
    return view;
  }

  function drawBands(ctx, bands, left, width, total) {
    bands.forEach((band, index) => {
      const x = left + (band.start / total) * width, w = ((band.end - band.start) / total) * width;
      ctx.fillStyle = index % 2 ? colour("--line") : colour("--null");
      ctx.fillRect(x, 14, Math.max(1, w - 1), 16);
      ctx.fillStyle = colour("--ink");
      ctx.textAlign = "center";
      if (ctx.measureText(band.name).width + 4 < w) ctx.fillText(band.name, x + w / 2, 22);
    });
    ctx.fillStyle = colour("--muted");
    ctx.textAlign = "left";
    ctx.fillText("byte 0 of the row", left, 6);
    ctx.textAlign = "right";
    ctx.fillText(number(total - 1), left + width, 6);
  }

  /** The bytes around the chosen one, one square each: same bytes of the neighbouring rows, or plain order in padding. */
  function bytesView(parent) {
    const { resource: id, states } = selection;
    const { rows, bytes } = geometryOf(id);
    const cells = make("div", undefined, "cells");
    const canvas = make("canvas");
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", "Single bytes around the chosen byte");
    parent.append(make("p", "Single bytes; the number at the left is the byte offset in the page.", "muted"), cells);
    cells.append(canvas);
    const view = { choose: null };
    let grid = [];
    let marks = [];
    const left = 66, side = clamp(Math.floor((cells.clientWidth - left - 4) / 32), 13, 18);
    const across = Math.floor((cells.clientWidth - left - 4) / side);

    view.draw = () => {
      const at = locate(id, selection.byte);
      grid = [];
      if (at) {
        const first = clamp(at.byte - (across >> 1), 0, Math.max(0, bytes.length - across));
        const columns = Array.from({ length: Math.min(across, bytes.length) }, (_, i) => first + i);
        for (let row = clamp(at.row - 3, 0, Math.max(0, rows.length - 7)); row < rows.length && grid.length < 7; row++) {
          grid.push(columns.map((byte) => rows[row] + bytes[byte]));
        }
      } else {
        const first = clamp(selection.byte - 3 * across - (across >> 1), 0, Math.max(0, states.length - 7 * across));
        for (let line = 0; line < 7 && first + line * across < states.length; line++) {
          const start = first + line * across;
          grid.push(Array.from({ length: Math.min(across, states.length - start) }, (_, i) => start + i));
        }
      }
      const ctx = sized(canvas, left + across * side + 4, grid.length * side + 4);
      marks.forEach((mark) => mark.remove());
      marks = [];
      const failing = new Set(targetsHere().filter((t) => t.resource === id && t.block === selection.block).map((t) => t.byte));
      grid.forEach((line, y) => {
        ctx.fillStyle = colour("--muted");
        ctx.textAlign = "right";
        ctx.font = "11px system-ui, sans-serif";
        ctx.fillText(number(line[0]), left - 6, 2 + y * side + side / 2);
        line.forEach((byte, x) => {
          const state = states[byte], px = left + x * side, py = 2 + y * side;
          ctx.fillStyle = flats[state];
          ctx.fillRect(px, py, side - 1, side - 1);
          ctx.fillStyle = colour(`--${names[state]}-letter`);
          ctx.textAlign = "center";
          ctx.fillText(letters[state], px + side / 2 - 0.5, py + side / 2);
          if (failing.has(byte)) marks.push(place(cells, "mark", px - 4, py - 4, side + 7, side + 7));
          if (byte === selection.byte) marks.push(place(cells, "mark chosen", px - 1, py - 1, side + 1, side + 1));
        });
      });
    };
    canvas.addEventListener("click", (event) => {
      const box = canvas.getBoundingClientRect();
      const byte = grid[Math.floor((event.clientY - box.top - 2) / side)]?.[Math.floor((event.clientX - box.left - left) / side)];
      if (byte !== undefined) view.choose(byte);
    });
    return view;
  }

  /** Whose value stands in a wrong byte: as a finding names it for this byte, else for the one before it in the page. */
  function ownerOf(id, block, byte) {
    const known = data.owners
      .filter((owner) => owner.map === current.index && owner.resource === id && owner.block === block)
      .sort((a, b) => a.byte - b.byte);
    if (!known.length) return "no finding names the owner";
    const near = known.filter((owner) => owner.byte <= byte).pop() ?? known[0];
    return near.byte === byte ? near.holds : `named for byte ${number(near.byte)} of this page: ${near.holds}`;
  }

  function describeByte(list) {
    const { resource: id, byte, states, block } = selection;
    const resource = data.resources[id], geometry = geometryOf(id), at = locate(id, byte);
    const wrong = isWrong(states[byte]) || targetsHere().some((t) => t.resource === id && t.block === block && t.byte === byte);
    const rows = [["byte of the page", number(byte)], ["state", `${names[states[byte]]}: ${data.states[states[byte]][2]}`, wrong]];
    if (isWrong(states[byte])) rows.push(["holds", ownerOf(id, block, byte), true]);
    if (at) {
      const token = resource.tokens_per_row && selection.own ? `, token ${number(selection.column * selection.group.block_size + at.row * resource.tokens_per_row)} of the request` : "";
      const head = geometry.heads > 1 ? `, head ${Math.floor(at.byte / geometry.inner)} byte ${at.byte % geometry.inner}` : "";
      rows.push(["row", `${number(at.row)}${token}`], ["byte of the row", number(at.byte) + head], ["field", fieldAt(geometry, at.byte)]);
    } else rows.push(["field", "padding, owned by no row"]);
    rows.push(["address", `storage ${resource.storage}, byte ${number(resource.offset + block * resource.block_stride + byte)}`]);
    list.replaceChildren(...rows.flatMap(([term, text, bad]) => [make("dt", term), make("dd", text, bad ? "bad" : "")]));
  }

  // ---- start ---------------------------------------------------------------------------------------------------
  function jump(index, reveal) {
    const target = data.targets[index];
    if (current.index !== target.map) show(target.map);
    const view = current.views.find((v) => v.group.id === target.group);
    const row = view.group.rows.indexOf(target.resource);
    const column = view.columns.findIndex(({ block }) => block === target.block);
    select({ ...cellOf(view, column, row), byte: target.byte }, false);
    view.frame.scrollTop = view.top + row * view.high - view.frame.clientHeight / 2;
    view.frame.scrollLeft = leftOf(view, column) - view.frame.clientWidth / 2;
    if (!reveal) return;
    const wideEnough = element("zoom").getBoundingClientRect().left > view.frame.getBoundingClientRect().left + 50;
    (wideEnough ? element("map") : element("zoom")).scrollIntoView({ behavior: "smooth", block: "start" });
  }

  if (!data.maps.length) return;
  mixPaints(make("canvas").getContext("2d"));
  data.maps.forEach((map, index) => {
    const option = make("option", `${map.failing ? "✕ " : ""}${map.scenario} · ${map.request}`);
    option.value = index;
    element("which").append(option);
  });
  element("picker").hidden = data.maps.length < 2;
  element("which").addEventListener("change", (event) => show(Number(event.target.value)));
  document.addEventListener("click", (event) => {
    const link = event.target.closest("[data-target]");
    if (!link) return;
    event.preventDefault();
    jump(Number(link.dataset.target), true);
  });

  function drawLegend() {
    const used = new Set(data.patterns.flatMap((pattern) => [...new Set(pattern.replace(/[0-9a-z]/g, ""))]));
    element("legend").replaceChildren(...data.states.filter(([letter]) => used.has(letter)).map(([letter, name, meaning]) => {
      const item = make("li");
      const swatch = make("canvas");
      const ctx = sized(swatch, 30, 16);
      const state = letters.indexOf(letter);
      ctx.fillStyle = paints[state];
      ctx.fillRect(0, 0, 30, 16);
      if (isWrong(state) || state === POISON || state === NULL) badge(ctx, 15, 8, state);
      item.append(swatch, make("span", `${name}: ${meaning}`));
      return item;
    }));
  }
  drawLegend();
  const first = data.targets.findIndex(Boolean);
  show(first >= 0 ? data.targets[first].map : 0);
  if (first >= 0) jump(first, false);

  const redraw = () => {
    mixPaints(make("canvas").getContext("2d"));
    drawLegend();
    current.views.forEach(drawMap);
    if (selection) drawZoom();
  };
  let waiting = 0;
  window.addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(redraw, 120); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
})();
