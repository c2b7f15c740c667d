// A chat, as a page of somebody's own has it. Gives status, request id and the whole stream.
const [url, key, done] = arguments;
const headers = {'Content-Type': 'application/json', 'X-Request-Id': 'mine'};
if (key) headers.Authorization = 'Bearer ' + key;
const messages = [{role: 'user', content: 'What is 3 + 4?'}];
fetch(url + '/v1/chat/completions', {
  method: 'POST', headers, body: JSON.stringify({model: 'demo', messages, max_tokens: 20, temperature: 0, stream: true}),
}).then(async answer => done([answer.status, answer.headers.get('x-request-id'), await answer.text()]), error => done([0, '', String(error)]));
