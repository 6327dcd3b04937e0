//! Properties for the fuzz targets: records through the format, without a file.

use std::fmt::Debug;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::record::{self, RECORD_VERSION, Stored, Table};
use super::upgrade::UPGRADES;
use nodedock_model::{
    AdapterRecord, ApiObject, ClaimRecord, ClaimValues, DriverOffer, EndedRecord, MechanismsRecord,
    NameRecord, NodeRecord, PodRecord, ReleaseRecord, ResourceOffer,
};

/// Checks that a record round-trips.
pub fn check_kept<R: Serialize + DeserializeOwned + PartialEq + Debug>(record: &R) {
    let value = record::value_of(record).expect("a record of ours can be written");
    let read: R = record::decode(Stored::of_this_release(&value), UPGRADES.records)
        .expect("what was written can be read");
    assert!(
        read == *record,
        "another record came back: {read:#?} instead of {record:#?}"
    );
}

/// Checks a value of a file: known and unknown fields are preserved when it is written again. Returns whether it could be read.
///
/// The first byte is the letter of the table, `a` for the first one; JSON follows, or after a capital letter a whole value with its version.
pub fn record(data: &[u8]) -> bool {
    let Some((letter, rest)) = data.split_first() else {
        return false;
    };
    let with_version = rest.split_first().filter(|_| letter.is_ascii_uppercase());
    let (version, record) = with_version.map_or((RECORD_VERSION, rest), |(version, record)| {
        (*version, record)
    });
    let value = Stored {
        version: version.into(),
        record,
    };
    match named(letter.to_ascii_lowercase()) {
        None => false,
        Some(Table::Claims) => read::<ClaimRecord>(Table::Claims, value),
        Some(Table::Pods) => read::<PodRecord>(Table::Pods, value),
        Some(Table::Released) => read::<ReleaseRecord>(Table::Released, value),
        Some(Table::Values) => read::<ClaimValues>(Table::Values, value),
        Some(Table::Objects) => read::<ApiObject>(Table::Objects, value),
        Some(Table::Names) => read::<NameRecord>(Table::Names, value),
        Some(Table::Machine) => read::<NodeRecord>(Table::Machine, value),
        Some(Table::Adapters) => read::<AdapterRecord>(Table::Adapters, value),
        Some(Table::Mechanisms) => read::<MechanismsRecord>(Table::Mechanisms, value),
        Some(Table::DriverOffers) => read::<DriverOffer>(Table::DriverOffers, value),
        Some(Table::ResourceOffers) => read::<ResourceOffer>(Table::ResourceOffers, value),
        Some(Table::Ended) => read::<EndedRecord>(Table::Ended, value),
    }
}

fn named(letter: u8) -> Option<Table> {
    Table::ALL
        .iter()
        .copied()
        .find(|table| letter_of(*table) == letter)
}

fn letter_of(table: Table) -> u8 {
    b'a' + table as u8
}

/// The tables, each with the letter that names it.
pub fn letters() -> Vec<(&'static str, u8)> {
    Table::ALL
        .iter()
        .map(|table| (table.as_str(), letter_of(*table)))
        .collect()
}

fn read<R: Serialize + DeserializeOwned + Debug>(table: Table, value: Stored<'_>) -> bool {
    let decode = |value: Stored<'_>| record::decode::<R>(value, UPGRADES.records);
    let Ok(record) = decode(value) else {
        return false;
    };
    let written = record::value_of(&record).expect("what was read can be written");
    let again = decode(Stored::of_this_release(&written)).expect("what was written can be read");
    check_same("written and read again", &json(&record), &json(&again));
    let carried =
        record::carry_over(table, value, &written).expect("what was read has something to carry");
    let kept =
        decode(Stored::of_this_release(&carried)).expect("what was carried over can be read");
    check_same("with what was carried over", &json(&record), &json(&kept));
    true
}

fn json(record: &impl Serialize) -> Value {
    serde_json::to_value(record).expect("a record is JSON")
}

fn check_same(when: &str, one: &Value, other: &Value) {
    assert!(
        same(one, other),
        "the record is another, {when}: {other} instead of {one}"
    );
}

/// Compares except for the last digits of fractions, which JSON parsers need not preserve, and which no known field has.
pub fn same(one: &Value, other: &Value) -> bool {
    match (one, other) {
        (Value::Array(one), Value::Array(other)) => {
            one.len() == other.len() && one.iter().zip(other).all(|(one, other)| same(one, other))
        }
        (Value::Object(one), Value::Object(other)) => {
            one.len() == other.len()
                && one
                    .iter()
                    .all(|(key, one)| other.get(key).is_some_and(|other| same(one, other)))
        }
        (Value::Number(one), Value::Number(other)) if one.is_f64() && other.is_f64() => {
            let (one, other) = (
                one.as_f64().unwrap_or_default(),
                other.as_f64().unwrap_or_default(),
            );
            (one - other).abs() <= one.abs() * 1e-12
        }
        _ => one == other,
    }
}
