// Everything that a page may send to a router at another origin. Gives what it could read of the answers.
const [url, done] = arguments;
const chat = JSON.stringify({model: 'demo', messages: [{role: 'user', content: 'hi'}], max_tokens: 3});
const targets = [
  ['POST', '/cluster/decode-0/drain', ''],
  ['POST', '/cluster/prefill-0/drain', '{}'],
  ['POST', '/flush_cache', ''],
  ['POST', '/cluster/trace?seconds=600', ''],
  ['DELETE', '/cluster/trace', ''],
  ['POST', '/abort_request', '{"abort_all": true}'],
  ['POST', '/v1/chat/completions', chat],
  ['POST', '/generate', '{"text": "hi"}'],
  ['POST', '/tokenize', '{"prompt": "hi"}'],
];
const pages = ['/cluster', '/v1/models', '/requests/x', '/metrics', '/openapi.json', '/health'];
const ofForms = ['text/plain', 'application/x-www-form-urlencoded', 'multipart/form-data'];
const types = ['application/json', ...ofForms, ''];
const asked = [], read = [];

function ask(what, path, init) {
  const answered = async answer => {
    const text = await answer.text();
    if (answer.ok || text) read.push(`${what} ${path} ${answer.status} ${text.slice(0, 80)}`);
  };
  asked.push(fetch(url + path, {credentials: 'include', ...init}).then(answered, () => {}));
}

function submit(path, enctype, body) {
  const frame = document.createElement('iframe'), form = document.createElement('form'), field = document.createElement('input');
  frame.name = path + enctype;
  [form.method, form.action, form.enctype, form.target] = ['POST', url + path, enctype, frame.name];
  [field.type, field.name, field.value] = ['hidden', body.slice(0, -1) + ', "user": "', '"}'];  // as text/plain it is JSON
  form.append(field);
  document.body.append(frame, form);
  form.submit();
}

for (const [method, path, body] of targets) {
  for (const type of types)
    for (const mode of ['cors', 'no-cors']) {
      const init = {method, mode, keepalive: true};
      if (body) init.body = type ? body : new Blob([body]);
      if (type) init.headers = {'Content-Type': type};
      ask(`${mode} ${method} ${type}`, path, init);
    }
  ask(`with a header ${method}`, path, {method, headers: {'X-Api-Key': 'x'}, body: body || undefined});
  navigator.sendBeacon(url + path, body);
  navigator.sendBeacon(url + path, new Blob([body], {type: 'text/plain'}));
  navigator.sendBeacon(url + path, new URLSearchParams({body}));
  for (const enctype of ofForms) submit(path, enctype, body || '{}');
  new Image().src = url + path;
  new EventSource(url + path);
}
for (const path of pages) {
  for (const mode of ['cors', 'no-cors']) ask(mode, path, {mode});
  const script = document.createElement('script');
  script.src = url + path;
  document.body.append(script);
}
new WebSocket(url.replace('http', 'ws') + '/cluster');
Promise.allSettled(asked).then(() => setTimeout(() => done(read), 1000));
