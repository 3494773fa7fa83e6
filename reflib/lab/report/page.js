"use strict";
// Copies text, opens and closes details, opens the targets of links, unpacks listings.
for (const button of document.querySelectorAll("button.copy")) {
  button.addEventListener("click", async () => {
    const code = button.closest(".code").querySelector("code");
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch {
      const range = document.createRange();
      range.selectNodeContents(code);
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      document.execCommand("copy");
    }
    button.textContent = "copied";
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  });
}
// The source of a line of IR: statement %4 is v4, a store is found by its buffer.
const lines = (code) => {
  const parts = code.textContent.split("\n").map((text) => {
    const line = document.createElement("span");
    line.className = "line";
    line.textContent = text;
    return line;
  });
  code.replaceChildren(...parts.flatMap((line, i) => (i ? ["\n", line] : [line])));
  return parts;
};
const pattern = (text) => {
  const value = text.match(/^\s*%(\d+) =/), store = text.match(/^\s*store (\w+)\[/);
  if (value) return new RegExp(`\\b(v|acc|total)${value[1]}\\b`);
  return store && new RegExp(`\\b${store[1]}(_ptr)?\\b`);
};
const link = () => {
  for (const pair of document.querySelectorAll(".pair")) {
    const ir = pair.querySelector(".ir code"), source = pair.querySelector(".source code");
    if (!ir) continue;
    const targets = lines(source);
    for (const line of lines(ir)) {
      const found = pattern(line.textContent);
      if (!found) continue;
      line.tabIndex = 0;
      const light = (on) => { for (const t of targets) t.classList.toggle("lit", on && found.test(t.textContent)); };
      for (const [event, on] of [["mouseenter", true], ["mouseleave", false], ["focus", true], ["blur", false]]) {
        line.addEventListener(event, () => light(on));
      }
    }
  }
};
// The listings of a large page are packed: base64 of gzip of a JSON list (page.py).
const unpack = async (packed) => {
  const bytes = Uint8Array.from(atob(packed), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const texts = JSON.parse(await new Response(stream).text());
  for (const code of document.querySelectorAll("code[data-text]")) code.textContent = texts[code.dataset.text];
  link();
};
const packed = document.getElementById("listings");
if (packed) unpack(packed.textContent);
else link();
const all = (open) => { for (const d of document.querySelectorAll("details")) d.open = open; };
document.getElementById("open").addEventListener("click", () => all(true));
document.getElementById("close").addEventListener("click", () => all(false));
const reveal = () => {
  const found = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (found && found.tagName === "DETAILS") {
    found.open = true;
    found.scrollIntoView();
  }
};
addEventListener("hashchange", reveal);
reveal();
