//! A claim with other entries in `status.devices`, and not a byte of the rest changed.
//!
//! An allocation cannot be changed, and an API server compares a driver's parameters in it byte by byte. So the claim is never read into
//! values and written again: what other clients wrote as `1.0`, `\u003c` or with keys in their own order has to come back as it was.
//! The form of JSON suffices where the parameters were stored without white space, as Go's encoder writes them. Where somebody created a claim with
//! white space in them, each JSON answer differs from what is stored, and every update in JSON (applied, patched or put) is
//! refused as one of `status.allocation`; the wire format of protobuf carries the stored bytes, and with it the update is taken. Pure.

use std::collections::BTreeMap;

use nodedock_proto::prost::encoding::{WireType, decode_key, decode_varint, encode_key, encode_varint};
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use super::entry::Key;

/// The bytes are not what they should be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the claim that the API server sent is not well formed: {0}")]
pub(super) struct Malformed(String);

/// A claim as far as its status of devices is concerned.
#[derive(Debug)]
pub(super) struct Read {
    pub uid: String,
    pub resource_version: String,
    /// None: not allocated.
    pub allocated: Option<Vec<Key>>,
    pub entries: Vec<Value>,
}

#[derive(Deserialize)]
struct Claim {
    metadata: Metadata,
    #[serde(default)]
    status: Option<Status>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Metadata {
    uid: String,
    #[serde(default)]
    resource_version: String,
}

#[derive(Deserialize, Default)]
struct Status {
    #[serde(default)]
    allocation: Option<Allocation>,
    #[serde(default)]
    devices: Option<Vec<Value>>,
}

#[derive(Deserialize)]
struct Allocation {
    #[serde(default)]
    devices: Devices,
}

#[derive(Deserialize, Default)]
struct Devices {
    #[serde(default)]
    results: Option<Vec<Value>>,
}

pub(super) fn read(claim: &[u8]) -> Result<Read, Malformed> {
    let claim: Claim = serde_json::from_slice(claim).map_err(|error| Malformed(error.to_string()))?;
    let status = claim.status.unwrap_or_default();
    let results = |allocation: Allocation| allocation.devices.results.unwrap_or_default();
    let keys = |allocation| results(allocation).iter().filter_map(Key::of).collect();
    Ok(Read {
        uid: claim.metadata.uid,
        resource_version: claim.metadata.resource_version,
        allocated: status.allocation.map(keys),
        entries: status.devices.unwrap_or_default(),
    })
}

/// The claim with such entries.
pub(super) fn json(claim: &[u8], entries: &[Value]) -> Result<Vec<u8>, Malformed> {
    let wrong = |error: serde_json::Error| Malformed(error.to_string());
    let mut claim: BTreeMap<String, &RawValue> = serde_json::from_slice(claim).map_err(wrong)?;
    let status = claim.get("status").map_or("{}", |status| status.get());
    let mut status: BTreeMap<String, &RawValue> = serde_json::from_str(status).map_err(wrong)?;
    let standing = status.get("devices").map_or("null", |devices| devices.get());
    let standing: Option<Vec<&RawValue>> = serde_json::from_str(standing).map_err(wrong)?;
    let standing = as_they_stand(standing.unwrap_or_default());
    let entries = entries.iter().map(|entry| match standing.iter().find(|(known, _)| known == entry) {
        // Numbers of others need not survive being read.
        Some((_, raw)) => Ok((*raw).to_owned()),
        None => serde_json::value::to_raw_value(entry).map_err(wrong),
    });
    let entries = serde_json::value::to_raw_value(&entries.collect::<Result<Vec<_>, _>>()?).map_err(wrong)?;
    status.insert("devices".to_owned(), &entries);
    if entries.get() == "[]" {
        status.remove("devices");
    }
    let status = serde_json::value::to_raw_value(&status).map_err(wrong)?;
    claim.insert("status".to_owned(), &status);
    serde_json::to_vec(&claim).map_err(wrong)
}

/// Entries as they are read, each with its bytes.
fn as_they_stand(entries: Vec<&RawValue>) -> Vec<(Value, &RawValue)> {
    entries.into_iter().filter_map(|raw| Some((serde_json::from_str(raw.get()).ok()?, raw))).collect()
}

/// What stands before every object in this form.
const MAGIC: &[u8] = b"k8s\0";

/// A field as it stands in a message: its number, how it is written, its content, and all of its bytes.
struct Field<'a> {
    number: u32,
    content: &'a [u8],
    whole: &'a [u8],
}

/// The claim in the form of protobuf with such entries instead of those of the drivers for which `ours` is true. It has to be the same
/// claim at the same version, else the entries may be about another allocation.
pub(super) fn protobuf(
    answer: &[u8],
    read: &Read,
    ours: impl Fn(&str) -> bool,
    entries: &[Value],
) -> Result<Option<Vec<u8>>, Malformed> {
    let envelope = answer.strip_prefix(MAGIC).ok_or_else(|| Malformed("it has no magic bytes".to_owned()))?;
    let mut envelope = fields(envelope)?;
    let object = envelope.iter().position(|field| field.number == 2);
    let object = object.ok_or_else(|| Malformed("the envelope is empty".to_owned()))?;
    let claim = fields(envelope[object].content)?;
    let metadata =
        claim.iter().find(|field| field.number == 1).map_or(Ok(Vec::new()), |f| fields(f.content))?;
    let text =
        |number| metadata.iter().find(|field| field.number == number).map_or(&b""[..], |field| field.content);
    if text(5) != read.uid.as_bytes() || text(6) != read.resource_version.as_bytes() {
        return Ok(None);
    }
    let mut written = Vec::with_capacity(answer.len() + 1024);
    for field in &claim {
        match field.number {
            3 => put(&mut written, 3, &status(field.content, &ours, entries)?),
            _ => written.extend_from_slice(field.whole),
        }
    }
    let mut whole = MAGIC.to_vec();
    for (place, field) in envelope.drain(..).enumerate() {
        match place == object {
            true => put(&mut whole, 2, &written),
            false => whole.extend_from_slice(field.whole),
        }
    }
    Ok(Some(whole))
}

fn status(status: &[u8], ours: &impl Fn(&str) -> bool, entries: &[Value]) -> Result<Vec<u8>, Malformed> {
    let mut written = Vec::with_capacity(status.len() + 1024);
    for field in fields(status)? {
        if field.number == 4 {
            let entry = fields(field.content)?;
            let driver = entry.iter().find(|f| f.number == 1).map_or(&b""[..], |f| f.content);
            if std::str::from_utf8(driver).is_ok_and(ours) {
                continue;
            }
        }
        written.extend_from_slice(field.whole);
    }
    for entry in entries.iter().filter(|entry| entry["driver"].as_str().is_some_and(ours)) {
        put(&mut written, 4, &device(entry));
    }
    Ok(written)
}

/// `AllocatedDeviceStatus`
fn device(entry: &Value) -> Vec<u8> {
    let mut message = Vec::new();
    let text = |name| entry.get(name).and_then(Value::as_str);
    for (number, name) in [(1, "driver"), (2, "pool"), (3, "device"), (7, "shareID")] {
        put_text(&mut message, number, text(name));
    }
    for entry in entry["conditions"].as_array().into_iter().flatten() {
        put(&mut message, 4, &condition(entry));
    }
    if let Some(data) = entry.get("data") {
        let mut raw = Vec::new();
        put(&mut raw, 1, data.to_string().as_bytes());
        put(&mut message, 5, &raw);
    }
    if let Some(network) = entry.get("networkData") {
        let mut data = Vec::new();
        put_text(&mut data, 1, network.get("interfaceName").and_then(Value::as_str));
        for ip in network["ips"].as_array().into_iter().flatten() {
            put_text(&mut data, 2, ip.as_str());
        }
        put_text(&mut data, 3, network.get("hardwareAddress").and_then(Value::as_str));
        put(&mut message, 6, &data);
    }
    message
}

/// `Condition` of apimachinery.
fn condition(condition: &Value) -> Vec<u8> {
    let mut message = Vec::new();
    put_text(&mut message, 1, condition["type"].as_str());
    put_text(&mut message, 2, condition["status"].as_str());
    let since: Option<jiff::Timestamp> =
        condition["lastTransitionTime"].as_str().and_then(|at| at.parse().ok());
    let mut time = Vec::new();
    encode_key(1, WireType::Varint, &mut time);
    encode_varint(since.map_or(0, |at| at.as_second().cast_unsigned()), &mut time);
    put(&mut message, 4, &time);
    put_text(&mut message, 5, condition["reason"].as_str());
    put_text(&mut message, 6, condition["message"].as_str());
    message
}

fn put_text(message: &mut Vec<u8>, number: u32, text: Option<&str>) {
    if let Some(text) = text {
        put(message, number, text.as_bytes());
    }
}

fn put(message: &mut Vec<u8>, number: u32, content: &[u8]) {
    encode_key(number, WireType::LengthDelimited, message);
    encode_varint(content.len() as u64, message);
    message.extend_from_slice(content);
}

/// The fields of a message, in order.
fn fields(message: &[u8]) -> Result<Vec<Field<'_>>, Malformed> {
    let wrong = |error: nodedock_proto::prost::DecodeError| Malformed(error.to_string());
    let short = || Malformed("it ends in the midst of a field".to_owned());
    let mut fields = Vec::new();
    let mut rest = message;
    while !rest.is_empty() {
        let begin = rest;
        let (number, wire) = decode_key(&mut rest).map_err(wrong)?;
        let length = match wire {
            WireType::Varint => {
                decode_varint(&mut rest).map_err(wrong)?;
                0
            }
            WireType::SixtyFourBit => 8,
            WireType::ThirtyTwoBit => 4,
            WireType::LengthDelimited => {
                usize::try_from(decode_varint(&mut rest).map_err(wrong)?).map_err(|_| short())?
            }
            WireType::StartGroup | WireType::EndGroup => return Err(Malformed("it has a group".to_owned())),
        };
        let (content, after) = rest.split_at_checked(length).ok_or_else(short)?;
        rest = after;
        fields.push(Field { number, content, whole: &begin[..begin.len() - rest.len()] });
    }
    Ok(fields)
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    const CLAIM: &[u8] = include_bytes!("../../../tests/fixtures/kubernetes-1.36/claim-one-gpu.json");

    /// A recorded claim in the form of protobuf, with parameters as somebody wrote them.
    pub(crate) fn recorded(parameters: &str, resource_version: &str) -> Vec<u8> {
        let mut metadata = Vec::new();
        put_text(&mut metadata, 1, Some("one-gpu"));
        put_text(&mut metadata, 3, Some("default"));
        put_text(&mut metadata, 5, Some("68a5aecc-0b16-411c-ac56-2f23834fb15c"));
        put_text(&mut metadata, 6, Some(resource_version));
        let mut status = Vec::new();
        put_text(&mut status, 1, Some(parameters));
        // A field of a later release.
        encode_key(19, WireType::Varint, &mut status);
        encode_varint(300, &mut status);
        let other = json!({"driver": "nic.example.com", "pool": "node-1", "device": "nic-0"});
        let old = json!({"driver": "gpu.example.com", "pool": "node-1", "device": "gpu-0"});
        put(&mut status, 4, &device(&old));
        put(&mut status, 4, &device(&other));
        let mut claim = Vec::new();
        put(&mut claim, 1, &metadata);
        put_text(&mut claim, 2, Some("spec"));
        put(&mut claim, 3, &status);
        let mut whole = MAGIC.to_vec();
        put_text(&mut whole, 1, Some("type"));
        put(&mut whole, 2, &claim);
        put_text(&mut whole, 3, Some(""));
        whole
    }

    /// Parameters and devices of such a claim.
    pub(crate) fn told(whole: &[u8]) -> (String, Vec<String>) {
        let envelope = fields(whole.strip_prefix(MAGIC).unwrap()).unwrap();
        let claim = fields(envelope[1].content).unwrap();
        let status = fields(claim[2].content).unwrap();
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        let device = |field: &Field<'_>| text(fields(field.content).unwrap()[2].content);
        (text(status[0].content), status.iter().filter(|field| field.number == 4).map(device).collect())
    }

    fn entry() -> Value {
        json!({"driver": "gpu.example.com", "pool": "node-1", "device": "gpu-0", "shareID": "s",
            "conditions": [{"type": "Ready", "status": "True", "reason": "Prepared", "message": "m",
                "lastTransitionTime": "2026-11-20T08:15:57Z"}],
            "data": {"numa": 0}, "networkData": {"ips": ["192.0.2.5/24"]}})
    }

    #[test]
    fn a_recorded_claim_is_read() {
        let read = read(CLAIM).unwrap();
        assert_eq!(read.resource_version, "141");
        assert_eq!(read.entries, [] as [Value; 0]);
        let allocated = read.allocated.unwrap();
        assert_eq!((allocated.len(), allocated[0].device.as_str()), (1, "gpu-0"));
        assert!(super::read(br#"{"metadata":{"uid":"a"},"status":{}}"#).unwrap().allocated.is_none());
        assert!(super::read(b"<html>").is_err());
    }

    #[test]
    fn all_but_the_devices_comes_back_byte_by_byte() {
        let odd = r#"{"z":1.0,"a":1e2,"b":"\u003c\/","big":123456789012345678901234567890,"a2":{"y":null,"x":[ 1 ]}}"#;
        let claim = format!(
            r#"{{"kind":"ResourceClaim","metadata":{{"uid":"a","resourceVersion":"7"}},"later":{odd},"status":{{"allocation":{odd},"devices":[1],"new":{odd}}}}}"#
        );
        let written = String::from_utf8(json(claim.as_bytes(), &[entry()]).unwrap()).unwrap();
        assert_eq!(written.matches(odd).count(), 3);
        assert_eq!(read(written.as_bytes()).unwrap().entries, [entry()]);
        let none = String::from_utf8(json(claim.as_bytes(), &[]).unwrap()).unwrap();
        assert!(!none.contains("devices") && none.matches(odd).count() == 3);
    }

    #[test]
    fn entries_of_others_come_back_byte_by_byte_too() {
        let odd = r#"{"driver":"nic.example.com","data":{"z":1e2,"big":123456789012345678901234567890,"a":[ "\u003c" ]}}"#;
        let claim =
            format!(r#"{{"metadata":{{"uid":"a"}},"status":{{"devices":[{odd},{{"driver":"old"}}]}}}}"#);
        let others = read(claim.as_bytes()).unwrap().entries.remove(0);
        let written = String::from_utf8(json(claim.as_bytes(), &[others, entry()]).unwrap()).unwrap();
        assert!(written.contains(odd) && !written.contains("old"), "{written}");
        assert_eq!(read(written.as_bytes()).unwrap().entries[1], entry());
    }

    #[test]
    fn a_recorded_claim_keeps_what_it_has() {
        let written: Value = serde_json::from_slice(&json(CLAIM, &[entry()]).unwrap()).unwrap();
        let mut wanted: Value = serde_json::from_slice(CLAIM).unwrap();
        wanted["status"]["devices"] = json!([entry()]);
        assert_eq!(written, wanted);
    }

    #[test]
    fn the_form_of_protobuf_keeps_white_space_in_parameters_and_the_entries_of_others() {
        let parameters = r#"{ "kind":  "GpuConfig" }"#;
        let claim = recorded(parameters, "141");
        let mut read = read(CLAIM).unwrap();
        let ours = |driver: &str| driver == "gpu.example.com";
        let new = json!({"driver": "gpu.example.com", "pool": "node-1", "device": "gpu-9"});
        let foreign = json!({"driver": "nic.example.com", "pool": "node-1", "device": "nic-9"});
        let written = protobuf(&claim, &read, ours, &[new, foreign]).unwrap().unwrap();
        let (kept, devices) = told(&written);
        assert_eq!((kept.as_str(), devices), (parameters, vec!["nic-0".to_owned(), "gpu-9".to_owned()]));
        // Nothing but our entry was changed: put back, the claim is what it was but for the order.
        let old = json!({"driver": "gpu.example.com", "pool": "node-1", "device": "gpu-0"});
        let back = protobuf(&written, &read, ours, &[old]).unwrap().unwrap();
        assert_eq!(back.len(), claim.len());
        read.resource_version = "142".to_owned();
        assert_eq!(protobuf(&claim, &read, ours, &[]), Ok(None));
    }

    #[test]
    fn an_entry_has_the_bytes_of_the_published_messages() {
        let bytes = device(&entry());
        let told: Vec<_> =
            fields(&bytes).unwrap().iter().map(|field| (field.number, field.content.len())).collect();
        // Numbers of resource.k8s.io/v1 AllocatedDeviceStatus.
        assert_eq!(told, [(1, 15), (2, 6), (3, 5), (7, 1), (4, 7 + 6 + 8 + 10 + 3), (5, 12), (6, 14)]);
        let time = fields(fields(&bytes).unwrap()[4].content).unwrap();
        assert_eq!(time[2].number, 4);
        let mut seconds = &time[2].content[1..];
        assert_eq!(decode_varint(&mut seconds).unwrap(), 1_795_162_557);
    }

    proptest! {
        #[test]
        fn no_bytes_do_harm(bytes in proptest::collection::vec(any::<u8>(), 0..200), cut in 0usize..200) {
            let ours = |_: &str| true;
            let read = read(CLAIM).unwrap();
            let mut framed = MAGIC.to_vec();
            framed.extend_from_slice(&bytes);
            let _ = protobuf(&framed, &read, ours, &[]);
            let claim = recorded("{}", "141");
            let _ = protobuf(&claim[..cut.min(claim.len())], &read, ours, &[entry()]);
            let _ = json(&bytes, &[entry()]);
        }
    }
}
