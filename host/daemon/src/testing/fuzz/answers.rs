//! A guest's answers: an accepted one is within every bound, becomes CDI files that the libraries accept, and is the same after the
//! checkpoint.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::bounds;
use nodedock_core::cdi::{self, FileAccess};
use nodedock_core::checkpoint::fuzz::check_kept;
use nodedock_core::device_metadata::{self, MetadataFile, MetadataSettings};
use nodedock_model::{
    AllocatedDevice, Allocation, ClaimRecord, ClaimState, DriverKind, DriverPart, ObjectName,
    ObjectRef, PoolNames, PreparedBy, PreparedClaim, Problem, Transition, is_cdi_vendor_or_class,
};
use nodedock_wasm::testing::fuzz::{AcceptedAnswer, Prepared, answer, driver};

/// An answer of a driver.
pub fn answers(data: &[u8]) -> bool {
    let Ok(answer) = answer(data) else {
        return false;
    };
    match answer {
        AcceptedAnswer::Description(info) => {
            bounds::description(&info);
            assert!(
                is_cdi_vendor_or_class(info.name.as_str()),
                "{} is no vendor of CDI devices",
                info.name
            );
        }
        AcceptedAnswer::Inventory(inventory) => bounds::inventory(&inventory),
        AcceptedAnswer::Health(report) => bounds::health(&report),
        AcceptedAnswer::Refusal(problem) => refused(problem),
        AcceptedAnswer::Prepared(prepared) => self::prepared(*prepared),
    }
    true
}

fn metadata() -> MetadataSettings {
    MetadataSettings {
        is_enabled: true,
        directory: "/run/nodedock/device-metadata".into(),
        access: FileAccess::default(),
        pools: PoolNames {
            node: ObjectName::new("node-1").expect("it is a DNS label"),
        },
    }
}

/// Each object of the stream has the devices of one request.
fn check_metadata(file: &MetadataFile) {
    let objects =
        serde_json::Deserializer::from_slice(&file.bytes).into_iter::<serde_json::Value>();
    for object in objects {
        let devices = &object.expect("a stream of JSON")["requests"][0]["devices"];
        assert!(
            devices
                .as_array()
                .is_some_and(|devices| !devices.is_empty()),
            "{devices}"
        );
    }
}

fn refused(problem: Problem) {
    bounds::problem(&problem);
    let transition = Transition {
        at_ms: 1,
        what: "refused".to_owned(),
        cause: String::new(),
        duration_us: 0,
        problem: Some(problem.clone()),
        again: None,
    };
    let part = DriverPart {
        problem: Some(problem),
        ..DriverPart::default()
    };
    check_kept(&ClaimRecord {
        timeline: [transition].into(),
        ..record(Vec::new(), part)
    });
}

fn prepared(prepared: Prepared) {
    bounds::prepared(&prepared.claim);
    let record = |claim| {
        let by = PreparedBy {
            kind: DriverKind::Wasm,
            version: "1.2.3".to_owned(),
            digest: String::new(),
            lists: false,
        };
        let part = DriverPart {
            prepared: Some(Arc::new(claim)),
            by: Some(by),
            ..DriverPart::default()
        };
        self::record(prepared.asked.devices.clone(), part)
    };
    for mut claim in [
        Ok(prepared.claim),
        prepared.verified.inspect(bounds::verified),
    ]
    .into_iter()
    .flatten()
    {
        let empty = record(PreparedClaim::default());
        if device_metadata::add(&empty, &driver(), &mut claim, None, &metadata()).is_ok() {
            let record = record(claim);
            check_durable(&record);
            device_metadata::render(&record, &metadata())
                .iter()
                .for_each(check_metadata);
        }
    }
}

fn record(devices: Vec<AllocatedDevice>, part: DriverPart) -> ClaimRecord {
    const PLAIN: &str = "the names are plain";
    let pod = ObjectRef::new("ml", "train-0", "pod-1").expect(PLAIN);
    ClaimRecord {
        id: ObjectRef::new("ml", "train", "0b1f-5.c_3").expect(PLAIN),
        state: ClaimState::Prepared,
        boot_id: "boot".to_owned(),
        pods: [(pod.uid.clone(), pod)].into(),
        allocation: Allocation {
            devices,
            ..Allocation::default()
        },
        annotations: BTreeMap::new(),
        drivers: BTreeMap::from([(driver(), Box::new(part))]),
        kubelet: None,
        holds: Vec::new(),
        resource: None,
        releasing: None,
        timeline: [].into(),
        unknown: BTreeMap::new(),
    }
}

fn check_durable(record: &ClaimRecord) {
    check_kept(record);
    match cdi::render(record) {
        Ok(files) => files.iter().for_each(check_file),
        // Edits for all containers of a claim need a device through which containers request them.
        Err(cdi::RenderError::EditsWithoutDevice { .. }) => {
            assert!(current(record).devices.is_empty());
        }
        Err(error) => {
            panic!(
                "an accepted answer has no CDI file: {}",
                nodedock_base::error::chain(&error)
            )
        }
    }
}

fn current(record: &ClaimRecord) -> &PreparedClaim {
    record.drivers[driver().as_str()]
        .current()
        .expect("it is prepared")
}

/// Two lines: the claim as a comment, and the spec.
fn check_file(file: &cdi::SpecFile) {
    let text = std::str::from_utf8(&file.bytes).expect("a file of ours is text");
    let lines: Vec<&str> = text.split('\n').collect();
    let [identity, spec, ""] = lines[..] else {
        panic!("{} lines: {text}", lines.len())
    };
    assert!(
        identity.starts_with("# nodedock.dev/claim: {"),
        "{identity}"
    );
    assert!(cdi::file_of(&file.name).is_some(), "{}", file.name);
    let as_json: cdi::Spec = serde_json::from_str(spec).expect("the spec is JSON");
    let as_yaml: cdi::Spec = serde_saphyr::from_str(text).expect("the file is YAML");
    assert_eq!(as_json, as_yaml, "the file differs as YAML and as JSON");
    cdi::validate(&as_json).expect("the file is a spec that libraries accept");
    assert_eq!(as_json.cdi_version, as_json.required_version().as_str());
}
