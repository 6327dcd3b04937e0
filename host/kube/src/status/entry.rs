//! An entry of `status.devices` from what a driver reports: what the API takes, and what of it does not fit.
//!
//! An API server refuses a whole status for one bad field, so each bound of it is kept here: what does not fit is left out and
//! reported, and the rest is written. Pure.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::events::camel_case;
use nodedock_base::printable::shorten;
use nodedock_model::check::{self, Findings, Violation};
use nodedock_model::{Condition, DeviceStatus, NetworkData, ReportedDevice, limit};

/// Device of a claim that an entry is about.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct Key {
    pub driver: String,
    pub pool: String,
    pub device: String,
    #[serde(rename = "shareID", skip_serializing_if = "Option::is_none")]
    pub share_id: Option<String>,
}

impl Key {
    pub(super) fn new(report: &ReportedDevice) -> Self {
        Self {
            driver: report.driver.to_string(),
            pool: report.pool.to_string(),
            device: report.device.to_string(),
            share_id: report.share_id.clone(),
        }
    }

    /// Reads the key of an entry of `status.devices`, or of a result of an allocation.
    pub(super) fn of(value: &Value) -> Option<Self> {
        let key = Self::deserialize(value).ok()?;
        // An empty share is none: older servers write it so.
        Some(Self {
            share_id: key.share_id.filter(|id| !id.is_empty()),
            ..key
        })
    }
}

/// The entry as the API has it. `before`: the current one, whose times of transition are kept. `now` in RFC 3339. What was left out
/// is described in `left_out`, a phrase each.
pub(super) fn entry(
    key: &Key,
    status: &DeviceStatus,
    before: Option<&Value>,
    now: &str,
    left_out: &mut Vec<String>,
) -> Value {
    let mut entry = serde_json::to_value(key).expect("its fields are texts");
    let conditions = conditions(&status.conditions, before, now, left_out);
    let conditions = Some(Value::from(conditions)).filter(|list| *list != json!([]));
    let data = status
        .data
        .as_deref()
        .and_then(|data| object(data, left_out));
    let network = status
        .network
        .as_ref()
        .and_then(|network| network_data(network, left_out));
    for (field, value) in [
        ("conditions", conditions),
        ("data", data),
        ("networkData", network),
    ] {
        if let Some(value) = value {
            entry[field] = value;
        }
    }
    entry
}

fn conditions(
    reported: &[Condition],
    before: Option<&Value>,
    now: &str,
    left_out: &mut Vec<String>,
) -> Vec<Value> {
    let mut kinds = BTreeSet::new();
    let mut conditions = Vec::new();
    for condition in reported {
        let kind = condition.kind.as_str();
        if let Some(why) = refusal(|found| check::condition_type(found, kind)) {
            left_out.push(format!("a condition: {why}"));
        } else if !kinds.insert(kind) {
            left_out.push(format!("a second condition {kind}"));
        } else if conditions.len() == limit::STATUS_CONDITIONS_MAX {
            left_out.push(format!(
                "condition {kind}: at most {} are taken",
                limit::STATUS_CONDITIONS_MAX
            ));
        } else {
            conditions.push(self::condition(condition, before, now));
        }
    }
    conditions
}

/// Returns what a check finds first.
fn refusal<T>(check: impl FnOnce(&mut Findings) -> T) -> Option<String> {
    let found = Findings::of(check).err()?;
    found.first().map(Violation::to_string)
}

fn condition(condition: &Condition, before: Option<&Value>, now: &str) -> Value {
    let status = match condition.status {
        Some(true) => "True",
        Some(false) => "False",
        None => "Unknown",
    };
    let current = before
        .and_then(|entry| entry.get("conditions"))
        .and_then(Value::as_array);
    let same = |c: &&Value| c["type"] == condition.kind.as_str() && c["status"] == status;
    let since = current.and_then(|conditions| conditions.iter().find(same));
    let since = since
        .and_then(|c| c["lastTransitionTime"].as_str())
        .unwrap_or(now);
    json!({
        "type": condition.kind,
        "status": status,
        "reason": reason(&condition.reason),
        "message": shorten(&condition.message, limit::CONDITION_MESSAGE_BYTES_MAX),
        "lastTransitionTime": since,
    })
}

/// A reason consists of letters and digits: another text is written as one.
fn reason(text: &str) -> String {
    match refusal(|found| check::condition_reason(found, text)) {
        None => text.to_owned(),
        Some(_) => camel_case(text),
    }
}

/// The API's document has no space: its bytes are counted without.
fn object(data: &str, left_out: &mut Vec<String>) -> Option<Value> {
    let compact = serde_json::from_str(data).map(|value: Value| value.to_string());
    let mut found = Findings::default();
    let value = check::data(&mut found, compact.as_deref().unwrap_or(data));
    left_out.extend(found.into_iter().map(|why| why.to_string()));
    value.map(Value::Object)
}

fn network_data(network: &NetworkData, left_out: &mut Vec<String>) -> Option<Value> {
    let mut data = Map::new();
    let (name, address) = (&network.interface_name, &network.hardware_address);
    let texts = [
        (
            "interfaceName",
            name,
            refusal(|found| check::interface_name(found, name)),
        ),
        (
            "hardwareAddress",
            address,
            refusal(|found| check::hardware_address(found, address)),
        ),
    ];
    for (field, text, refusal) in texts {
        match refusal {
            Some(why) => left_out.push(why),
            None if text.is_empty() => {}
            None => drop(data.insert(field.to_owned(), text.as_str().into())),
        }
    }
    let mut ips: Vec<String> = Vec::new();
    for ip in &network.ips {
        let mut found = Findings::default();
        match check::interface_address(&mut found, ip) {
            None => left_out.push(format!("an address: {found}")),
            // A duplicate.
            Some(ip) if ips.contains(&ip) => {}
            Some(ip) if ips.len() == limit::STATUS_IPS_MAX => {
                left_out.push(format!(
                    "the address {ip}: at most {} are taken",
                    limit::STATUS_IPS_MAX
                ));
            }
            Some(ip) => ips.push(ip),
        }
    }
    if !ips.is_empty() {
        data.insert("ips".to_owned(), ips.into());
    }
    (!data.is_empty()).then(|| data.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: &str = "2026-11-22T07:00:00Z";

    fn key() -> Key {
        Key {
            driver: "gpu.example.com".to_owned(),
            pool: "node-1".to_owned(),
            device: "gpu-0".to_owned(),
            share_id: None,
        }
    }

    fn ready(status: Option<bool>, reason: &str) -> Condition {
        Condition {
            kind: "Ready".to_owned(),
            status,
            reason: reason.to_owned(),
            message: "words".to_owned(),
        }
    }

    fn made(status: &DeviceStatus, before: Option<&Value>) -> (Value, Vec<String>) {
        let mut left_out = Vec::new();
        let entry = entry(&key(), status, before, NOW, &mut left_out);
        (entry, left_out)
    }

    #[test]
    fn an_entry_has_what_was_reported() {
        let status = DeviceStatus {
            attributes: Default::default(),
            conditions: vec![
                ready(Some(true), "Prepared"),
                Condition {
                    kind: "a/Link".to_owned(),
                    ..ready(None, "")
                },
            ],
            data: Some(r#"{"numa": 0}"#.to_owned()),
            network: Some(NetworkData {
                interface_name: "net1".to_owned(),
                ips: vec![
                    "192.0.2.5/24".to_owned(),
                    "2001:DB8:0::5/064".to_owned(),
                    "2001:db8::5/64".to_owned(),
                ],
                hardware_address: String::new(),
            }),
        };
        let (entry, left_out) = made(&status, None);
        let wanted = json!({
            "driver": "gpu.example.com", "pool": "node-1", "device": "gpu-0",
            "conditions": [
                {"type": "Ready", "status": "True", "reason": "Prepared", "message": "words", "lastTransitionTime": NOW},
                {"type": "a/Link", "status": "Unknown", "reason": "Unspecified", "message": "words", "lastTransitionTime": NOW},
            ],
            "data": {"numa": 0},
            "networkData": {"interfaceName": "net1", "ips": ["192.0.2.5/24", "2001:db8::5/64"]},
        });
        assert_eq!(entry, wanted);
        assert_eq!(left_out, [""; 0]);
        assert_eq!(Key::of(&entry), Some(key()));
    }

    #[test]
    fn only_transitions_change_condition_time() {
        let before = json!({"conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": "2020-01-01T00:00:00Z"}]});
        let time = |status| {
            let status = DeviceStatus {
                conditions: vec![ready(status, "Other")],
                ..DeviceStatus::default()
            };
            made(&status, Some(&before)).0["conditions"][0]["lastTransitionTime"].clone()
        };
        assert_eq!(time(Some(true)), "2020-01-01T00:00:00Z");
        assert_eq!(time(Some(false)), NOW);
        assert_eq!(time(None), NOW);
    }

    #[test]
    fn oversized_status_parts_are_left_out() {
        let many = (0..10).map(|i| Condition {
            kind: format!("C{i}"),
            ..ready(Some(true), "link-up")
        });
        let odd = ["", "a b", "Ready/", "C1"].map(|kind| Condition {
            kind: kind.to_owned(),
            ..ready(None, "x")
        });
        let status = DeviceStatus {
            attributes: Default::default(),
            conditions: many.chain(odd).collect(),
            data: Some(format!(
                r#"{{"a":"{}"}}"#,
                "x".repeat(limit::STATUS_DATA_BYTES_MAX)
            )),
            network: Some(NetworkData {
                interface_name: "n".repeat(257),
                ips: (0..20)
                    .map(|i| format!("192.0.2.{i}/24"))
                    .chain(
                        [
                            "::ffff:1.2.3.4/96",
                            "1.2.3.4",
                            "1.2.3.4/33",
                            "1.2.3.04/8",
                            "1.2.3.4/+8",
                            "x/8",
                        ]
                        .map(str::to_owned),
                    )
                    .collect(),
                hardware_address: "00:00:5e:00:53:01".to_owned(),
            }),
        };
        let (entry, left_out) = made(&status, None);
        assert_eq!(entry["conditions"].as_array().map(Vec::len), Some(8));
        assert_eq!(entry["conditions"][0]["reason"], "LinkUp");
        assert_eq!(entry.get("data"), None);
        assert_eq!(
            entry["networkData"]["ips"].as_array().map(Vec::len),
            Some(16)
        );
        assert_eq!(entry["networkData"].get("interfaceName"), None);
        assert_eq!(entry["networkData"]["hardwareAddress"], "00:00:5e:00:53:01");
        assert_eq!(left_out.len(), 2 + 4 + 1 + 1 + 4 + 6, "{left_out:#?}");
        for data in ["[]", "null", "3", "{"] {
            let status = DeviceStatus {
                data: Some(data.to_owned()),
                ..DeviceStatus::default()
            };
            assert_eq!(made(&status, None).1.len(), 1, "{data}");
        }
    }
}
