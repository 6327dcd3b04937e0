//! The record of the checkpoint, as the switch has it. Without it nothing is known, and both mechanisms are read before either offers.

use super::switch::{LocalPool, PoolRecord, Record};
use nodedock_model::{MechanismsRecord, PoolMechanism};

impl From<MechanismsRecord> for Record {
    fn from(stored: MechanismsRecord) -> Self {
        let pools = stored.pools.into_iter().map(|stored| {
            let PoolMechanism {
                driver,
                pool,
                resource,
                mechanism,
                claimed,
            } = stored;
            let record = PoolRecord {
                resource,
                mechanism,
                claimed,
            };
            (LocalPool { driver, pool }, record)
        });
        Self {
            decided: stored.decided,
            pools: pools.collect(),
        }
    }
}

impl From<&Record> for MechanismsRecord {
    fn from(record: &Record) -> Self {
        let pools = record.pools.iter().map(|(key, record)| PoolMechanism {
            driver: key.driver.clone(),
            pool: key.pool.clone(),
            resource: record.resource.clone(),
            mechanism: record.mechanism,
            claimed: record.claimed.clone(),
        });
        Self {
            decided: record.decided,
            pools: pools.collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nodedock_model::Mechanism;

    #[test]
    fn a_record_is_the_same_after_it_was_stored() {
        let pool = |pool: &str, mechanism, claimed: &[&str]| PoolMechanism {
            driver: "gpu.example.com".parse().unwrap(),
            pool: pool.parse().unwrap(),
            resource: "example.com/gpu".parse().unwrap(),
            mechanism,
            claimed: claimed.iter().map(|name| name.parse().unwrap()).collect(),
        };
        let stored = MechanismsRecord {
            decided: Some(Mechanism::Dra),
            pools: vec![
                pool("a", Mechanism::Dra, &[]),
                pool("b/c", Mechanism::DevicePlugin, &["0", "1"]),
            ],
        };
        let record = Record::from(stored.clone());
        assert_eq!(record.pools.len(), 2);
        assert_eq!(MechanismsRecord::from(&record), stored);
    }
}
