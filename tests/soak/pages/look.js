// What /docs shows: how many operations, and where all that it loaded is from.
const [done] = arguments, loaded = performance.getEntriesByType('resource').map(entry => new URL(entry.name).origin);
done([document.querySelectorAll('.opblock').length, [...new Set(loaded)]]);
