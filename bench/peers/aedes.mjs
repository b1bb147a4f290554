// The aedes broker as bench/run starts it: aedes.mjs PORT. In-memory persistence, loopback only.
import net from 'node:net';
import { Aedes } from 'aedes';

const aedes = await Aedes.createBroker();
net.createServer({ noDelay: true }, aedes.handle).listen(Number(process.argv[2]), '127.0.0.1', 4096);
