// Draws the page's Vega-Lite figures from the JSON beside them, in the page's own colours, again when the mode changes.
(function () {
  "use strict";

  function colours() {
    const style = getComputedStyle(document.documentElement);
    const text = style.getPropertyValue("--pst-color-text-base").trim() || "#222";
    const line = style.getPropertyValue("--pst-color-border").trim() || "#bbb";
    const axis = { labelColor: text, titleColor: text, gridColor: line, domainColor: line, tickColor: line };
    return {
      background: "transparent",
      title: { color: text },
      axis: axis,
      legend: { labelColor: text, titleColor: text },
      header: { labelColor: text, titleColor: text },
      text: { color: text },
      view: { stroke: line },
    };
  }

  // Vega-Lite cannot fit several views to their container, so a figure that asks for it (usermeta.fit) gets numbers: a
  // guess of the room for labels, and then what the guess leaves over, as a drawing that is not shown tells.
  function fits(spec, width) {
    return spec.usermeta && spec.usermeta.fit && spec.vconcat && width;
  }

  function guess(spec, width) {
    const labels = Math.min(170, Math.round(0.4 * width));
    spec.vconcat.forEach(function (view) {
      view.width = Math.max(90, width - labels - 50);
      const y = view.encoding && view.encoding.y;
      if (y && y.axis && y.axis.labelLimit) y.axis.labelLimit = labels;
    });
  }

  function fit(spec, place, options) {
    const width = place.clientWidth;
    if (!fits(spec, width)) return Promise.resolve();
    guess(spec, width);
    const trial = document.createElement("div");
    trial.style.cssText = "position: absolute; visibility: hidden";
    place.appendChild(trial);
    return vegaEmbed(trial, spec, options).then(function (drawn) {
      const drawnWidth = trial.querySelector("svg").viewBox.baseVal.width;  // before the page shrinks it
      const left = Math.floor(width - drawnWidth);
      spec.vconcat.forEach(function (view) { view.width = Math.max(90, view.width + left); });
      drawn.finalize();
      trial.remove();
    });
  }

  // What a figure says after it was moved is in its picture; a screen reader is told it, too.
  function tell(place, view) {
    if (!("says" in view.getState({ signals: function (name) { return name === "says"; } }).signals)) return;
    let told = place.querySelector(".reflib-told");
    if (!told) {
      told = document.createElement("p");
      told.className = "reflib-told";
      told.setAttribute("aria-live", "polite");
      place.appendChild(told);
    }
    view.addSignalListener("says", function (name, says) { told.textContent = [].concat(says).join(". "); });
  }

  // Vega calls each of its marks a symbol; what has no words is none to a screen reader.
  function quiet(canvas) {
    canvas.querySelectorAll("[role=graphics-symbol]:not([aria-label])").forEach(function (mark) {
      mark.removeAttribute("role");
      mark.setAttribute("aria-hidden", "true");
    });
  }

  function draw() {
    document.querySelectorAll(".reflib-vega").forEach(function (place) {
      const spec = JSON.parse(place.querySelector("script").textContent);
      let canvas = place.querySelector(".reflib-vega-canvas");
      if (!canvas) {
        canvas = document.createElement("div");
        canvas.className = "reflib-vega-canvas";
        place.appendChild(canvas);
      }
      const options = { actions: false, renderer: "svg", config: colours() };
      const turn = place.turn = (place.turn || 0) + 1;
      place.drawnFor = place.clientWidth;
      fit(spec, place, options).then(function () {
        return place.turn === turn ? vegaEmbed(canvas, spec, options) : null;  // else a later drawing is under way
      }).then(function (drawn) {
        if (!drawn) return;
        quiet(canvas);
        tell(place, drawn.view);
      }).catch(function (error) {
        canvas.textContent = "This figure could not be drawn: " + error.message;
      });
    });
  }

  function start() {
    draw();
    const places = Array.from(document.querySelectorAll(".reflib-vega"));
    let timer = 0;
    const seen = new ResizeObserver(function () {  // also when a sidebar moves; its widths on the way do not count
      clearTimeout(timer);
      timer = setTimeout(function () {
        if (places.some(function (p) { return Math.abs(p.clientWidth - p.drawnFor) >= 40; })) draw();
      }, 200);
    });
    places.forEach(function (place) { seen.observe(place); });
    new MutationObserver(draw).observe(document.documentElement, { attributeFilter: ["data-theme"] });
  }
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
