// What scrolls inside a page can be reached by keyboard, whatever put it there: a listing, a table, a wide formula.
// What unfolds a part of the contents has a name: in the theme it is an arrow. A signature's parameters are no list of
// definitions: Sphinx makes one of them for the looks.
(function () {
  "use strict";

  function reach() {
    document.querySelectorAll(".bd-article pre, .bd-article div, .bd-article mjx-container").forEach(function (box) {
      const wider = box.scrollWidth > box.clientWidth, higher = box.scrollHeight > box.clientHeight;
      if (!wider && !higher) return;
      const style = getComputedStyle(box);
      const scrolls = /auto|scroll/;
      if ((wider && scrolls.test(style.overflowX)) || (higher && scrolls.test(style.overflowY))) box.tabIndex = 0;
    });
  }

  function name() {
    document.querySelectorAll("nav summary:not([aria-label])").forEach(function (arrow) {
      const link = arrow.closest("li").querySelector("a");
      if (!arrow.textContent.trim() && link) arrow.setAttribute("aria-label", "Parts of " + link.textContent.trim());
    });
  }

  document.querySelectorAll("dt.sig dl, dt.sig dd").forEach(function (part) { part.setAttribute("role", "presentation"); });
  name();
  reach();
  window.addEventListener("load", reach);
  window.addEventListener("resize", reach);
})();
