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
      view: { stroke: line },
    };
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
      vegaEmbed(canvas, spec, { actions: false, renderer: "svg", config: colours() }).catch(function (error) {
        canvas.textContent = "This figure could not be drawn: " + error.message;
      });
    });
  }

  function start() {
    draw();
    new MutationObserver(draw).observe(document.documentElement, { attributeFilter: ["data-theme"] });
  }
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
