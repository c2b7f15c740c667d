// "Try it out" of POST /tokenize on /docs, as by hand. Gives the status that the page shows.
const [done] = arguments, until = Date.now() + 60000, path = '.opblock-summary-path';
const block = () => [...document.querySelectorAll('.opblock')].find(one => one.querySelector(path)?.dataset.path == '/tokenize');

function when(selector, then) {
  const found = block().querySelector(selector);
  if (found) then(found);
  else if (Date.now() > until) done('');
  else setTimeout(() => when(selector, then), 100);
}

block().querySelector('.opblock-summary-control').click();
when('.try-out__btn', button => {
  button.click();
  when('textarea', area => {
    Object.getOwnPropertyDescriptor(HTMLTextAreaElement.prototype, 'value').set.call(area, '{"prompt": "hello"}');
    area.dispatchEvent(new Event('input', {bubbles: true}));
    when('.btn.execute', execute => {
      execute.click();
      when('.live-responses-table tbody .response-col_status', cell => done(cell.innerText));
    });
  });
});
