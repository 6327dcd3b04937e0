//! Lists that are read with as much memory as they need: a list that grows while it is read has room for four elements, or for up to twice
//! as many, for as long as its record lives.

use std::collections::VecDeque;

use serde::{Deserialize, Deserializer};

pub(crate) fn list<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<T>, D::Error> {
    let mut list = Vec::deserialize(deserializer)?;
    list.shrink_to_fit();
    Ok(list)
}

pub(crate) fn queue<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<VecDeque<T>, D::Error> {
    list(deserializer).map(VecDeque::from)
}

#[cfg(test)]
mod tests {
    use crate::{Allocation, ClaimRecord};

    /// Story: 10,000 claims took 3 KiB more each after a restart, because their lists of one device had room for four.
    #[test]
    fn read_lists_have_no_spare_room() {
        let device = r#"{"request": "a", "driver": "a.dev", "pool": "p", "device": "d"}"#;
        let text = format!(r#"{{"devices": [{device}], "configs": []}}"#);
        let allocation: Allocation = serde_json::from_str(&text).unwrap();
        assert_eq!(allocation.devices.capacity(), 1);
        let text = format!(
            r#"{{"id": {{"namespace": "n", "name": "c", "uid": "u"}}, "state": "prepared", "boot_id": "b", "pods": {{}},
                "allocation": {text}, "drivers": {{}}, "holds": [{{"key": "k"}}], "timeline": [{{"at_ms": 1, "what": "x"}}]}}"#
        );
        let record: ClaimRecord = serde_json::from_str(&text).unwrap();
        assert_eq!(
            (record.holds.capacity(), record.timeline.capacity()),
            (1, 1)
        );
        assert_eq!(record.clone(), record);
    }
}
