"""Ray clusters: sessions, fleets of actors, a parameter server, replay shards. Only this folder imports ray."""
