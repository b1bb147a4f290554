"""Black-box tests of the normative statements of MQTT 3.1.1 and 5, one file per chapter or section."""
