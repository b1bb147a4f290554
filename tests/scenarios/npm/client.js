// One MQTT.js client that is driven over standard input and output.
//
// Each line in is a command {"do": ..., "n": ..., ...}; its end is told by a line {"done": n} or {"done": n, "error": ...}.
// Each message that arrives is a line {"message": {...}}. Payloads and correlation data are base64.
'use strict';

const mqtt = require('mqtt');
const readline = require('node:readline');

let client = null;

function tell(event) {
  process.stdout.write(JSON.stringify(event) + '\n');
}

function connect(command, done) {
  client = mqtt.connect(command.url, {
    clientId: command.clientId,
    clean: command.clean,
    protocolVersion: command.version,
    properties: command.sessionExpiry ? { sessionExpiryInterval: command.sessionExpiry } : undefined,
    will: command.will ? { ...command.will, payload: Buffer.from(command.will.payload, 'base64') } : undefined,
    reconnectPeriod: 0,
    resubscribe: false,
  });
  client.once('connect', () => done());
  client.on('error', (error) => done(error));
  client.on('message', (topic, payload, packet) => {
    const given = packet.properties || {};
    tell({
      message: {
        topic,
        payload: payload.toString('base64'),
        qos: packet.qos,
        retain: packet.retain,
        properties: {
          ...given,
          correlationData: given.correlationData && Buffer.from(given.correlationData).toString('base64'),
        },
      },
    });
  });
}

function publish(command, done) {
  const options = { qos: command.qos, retain: command.retain };
  if (command.properties) {
    const correlationData = Buffer.from(command.properties.correlationData, 'base64');
    options.properties = { ...command.properties, correlationData };
  }
  client.publish(command.topic, Buffer.from(command.payload, 'base64'), options, done);
}

function subscribe(command, done) {
  client.subscribe(command.filter, { qos: command.qos }, (error, granted) => {
    const asGranted = !error && granted.length === 1 && granted[0].qos === command.qos;
    done(error || (asGranted ? undefined : new Error('granted ' + JSON.stringify(granted))));
  });
}

function drop(command, done) {
  client.once('close', () => done());
  client.stream.destroy();
}

const commands = { connect, publish, subscribe, drop, disconnect: (command, done) => client.end(false, {}, done) };

readline.createInterface({ input: process.stdin }).on('line', (line) => {
  const command = JSON.parse(line);
  let told = false;
  commands[command.do](command, (error) => {
    if (told) return; // an error event may come again when the connection goes
    told = true;
    tell(error ? { done: command.n, error: String(error) } : { done: command.n });
  });
}).on('close', () => process.exit(0));
