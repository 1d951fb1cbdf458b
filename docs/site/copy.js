// A button on each block of code that copies it; of a console only the commands, without the $ before them.
addEventListener("DOMContentLoaded", () => {
  for (const block of document.querySelectorAll("div.highlight:has(> pre)")) {
    const holder = block.closest("[class*=highlight-]"), pre = block.querySelector("pre");
    if (holder?.classList.contains("output")) continue;
    const button = document.createElement("button");
    button.className = "copy", button.type = "button", button.textContent = "Copy";
    button.addEventListener("click", async () => {
      const text = pre.textContent.trimEnd();
      const commands = text.split("\n").filter(line => line.startsWith("$ ")).map(line => line.slice(2));
      await navigator.clipboard.writeText(holder?.classList.contains("highlight-console") && commands.length ? commands.join("\n") : text);
      button.textContent = "Copied";
      setTimeout(() => button.textContent = "Copy", 1500);
    });
    block.append(button);
  }
});
