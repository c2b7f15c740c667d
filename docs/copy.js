// A button on each block of code that copies it, without the prompts of hosts.
document.querySelectorAll("pre").forEach((block) => {
  const button = document.createElement("button");
  const code = block.innerText;
  button.textContent = "Copy";
  button.style.cssText = "position:absolute;top:4px;right:4px;font-size:80%;opacity:0.7";
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(code.replace(/^(node-\d|\d+(\.\d+){3})\$ /gm, ""));
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 2000);
  });
  block.parentElement.style.position = "relative";
  block.parentElement.append(button);
});
