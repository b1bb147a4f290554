SELECT vin FROM fleet WHERE model = 'M1' AND region = 'north'
