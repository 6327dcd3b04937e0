use std::collections::BTreeMap;
use std::sync::Arc;

use super::*;
use nodedock_model::{
    self, AllocatedDevice, ClaimRecord, ClaimState, DeviceAccess, DeviceName, DriverKind,
    DriverName, DriverPart, Edits, NodeKind, ObjectRef, PoolName, PreparedBy, PreparedClaim,
    PreparedDevice, Uid,
};

mod directory;
mod rules;

fn driver() -> DriverName {
    DriverName::new("gpu.example.com").unwrap()
}

fn node(path: &str) -> nodedock_model::DeviceNode {
    nodedock_model::DeviceNode {
        path: path.to_owned(),
        host_path: None,
        kind: Some(NodeKind::Character),
        major: Some(195),
        minor: Some(0),
        permissions: "rw".to_owned(),
        file_mode: None,
        uid: None,
        gid: None,
    }
}

fn with_env(name: &str, value: &str) -> Edits {
    Edits {
        env: vec![(name.to_owned(), value.to_owned())],
        ..Edits::default()
    }
}

fn device(pool: &str, name: &str, edits: Edits) -> PreparedDevice {
    PreparedDevice {
        requests: vec!["gpu".to_owned()],
        pool: PoolName::new(pool).unwrap(),
        device: DeviceName::new(name).unwrap(),
        share_id: None,
        access: DeviceAccess::Edits(edits),
        status: None,
        attributes: None,
    }
}

fn claim_with_uid(uid: &str, prepared: PreparedClaim) -> ClaimRecord {
    let allocated = |device: &PreparedDevice| AllocatedDevice {
        request: "gpu".to_owned(),
        driver: driver(),
        pool: device.pool.clone(),
        device: device.device.clone(),
        share_id: None,
        consumed: BTreeMap::new(),
        admin_access: false,
        binding: Default::default(),
    };
    let by = PreparedBy {
        kind: DriverKind::Wasm,
        version: "1.2.0".to_owned(),
        digest: String::new(),
        lists: false,
    };
    let pod = ObjectRef::new("ml", "train-0", "pod-1").unwrap();
    let id = ObjectRef::new("ml", "train-gpu", uid).unwrap();
    let mut record = ClaimRecord::new(id, ClaimState::Prepared, "5a8d");
    record.pods.insert(pod.uid.clone(), pod);
    record.allocation.devices = prepared.devices.iter().map(allocated).collect();
    let part = DriverPart {
        prepared: Some(Arc::new(prepared)),
        by: Some(by),
        ..DriverPart::default()
    };
    record.drivers.insert(driver(), Box::new(part));
    record
}

fn claim(prepared: PreparedClaim) -> ClaimRecord {
    claim_with_uid("c1", prepared)
}

fn one(edits: Edits) -> PreparedClaim {
    PreparedClaim {
        devices: vec![device("node-a", "gpu-0", edits)],
        ..PreparedClaim::default()
    }
}

fn rendered(record: &ClaimRecord) -> SpecFile {
    render_driver(record, &driver()).unwrap().unwrap()
}

fn text(record: &ClaimRecord) -> String {
    String::from_utf8(rendered(record).bytes).unwrap()
}

fn spec_line(text: &str) -> &str {
    text.split_once('\n').unwrap().1
}

fn spec(record: &ClaimRecord) -> Spec {
    serde_json::from_str(spec_line(&text(record))).unwrap()
}

#[test]
fn file_has_identity_and_json_line() {
    let mut prepared = one(Edits {
        device_nodes: vec![node("/dev/gpu0")],
        ..with_env("GPU", "0")
    });
    prepared.edits = with_env("ALL", "yes");
    let record = claim(prepared);
    let file = rendered(&record);
    assert_eq!(file.name, "gpu.example.com_c1.yaml");
    let golden = concat!(
        r##"# nodedock.dev/claim: {"version":1,"namespace":"ml","name":"train-gpu","uid":"c1","driver":"gpu.example.com","##,
        r#""driverVersion":"1.2.0","bootId":"5a8d","pods":[{"namespace":"ml","name":"train-0","uid":"pod-1"}],"#,
        r#""devices":[{"requests":["gpu"],"pool":"node-a","device":"gpu-0"}],"#,
        r#""allocated":[{"request":"gpu","driver":"gpu.example.com","pool":"node-a","device":"gpu-0"}]}"#,
        "\n",
        r#"{"cdiVersion":"0.3.0","kind":"gpu.example.com/claim","devices":[{"name":"c1-gpu-0","containerEdits":"#,
        r#"{"env":["GPU=0"],"deviceNodes":[{"path":"/dev/gpu0","type":"c","major":195,"minor":0,"permissions":"rw"}]}}],"#,
        r#""containerEdits":{"env":["ALL=yes"]}}"#,
        "\n",
    );
    assert_eq!(String::from_utf8(file.bytes.clone()).unwrap(), golden);
    assert_eq!(rendered(&record.clone()).bytes, file.bytes);
}

#[test]
fn every_edit_has_its_field() {
    let edits = Edits {
        env: vec![("A".to_owned(), "1=2".to_owned())],
        device_nodes: vec![nodedock_model::DeviceNode {
            host_path: Some("/dev/host".to_owned()),
            kind: Some(NodeKind::Block),
            permissions: String::new(),
            file_mode: Some(0o660),
            uid: Some(1),
            gid: Some(2),
            ..node("/dev/inside")
        }],
        mounts: vec![nodedock_model::Mount {
            host_path: "/opt/lib".to_owned(),
            container_path: "/usr/lib/gpu".to_owned(),
            options: vec!["ro".to_owned()],
            fs_type: Some("none".to_owned()),
        }],
        net_devices: vec![nodedock_model::NetDevice {
            host_interface: "eth1".to_owned(),
            container_interface: "net0".to_owned(),
        }],
        hooks: vec![nodedock_model::Hook {
            stage: "createContainer".to_owned(),
            path: "/usr/bin/hook".to_owned(),
            args: vec!["hook".to_owned()],
            env: vec![("B".to_owned(), String::new())],
            timeout_seconds: Some(5),
        }],
        additional_gids: vec![44],
        intel_rdt: Some(nodedock_model::IntelRdt {
            clos_id: Some("gold".to_owned()),
            schemata: vec!["L3:0=f".to_owned()],
            enable_monitoring: true,
        }),
    };
    let golden = concat!(
        r#"{"cdiVersion":"1.1.0","kind":"gpu.example.com/claim","devices":[{"name":"c1-gpu-0","containerEdits":{"#,
        r#""env":["A=1=2"],"deviceNodes":[{"path":"/dev/inside","hostPath":"/dev/host","type":"b","major":195,"minor":0,"#,
        r#""fileMode":432,"permissions":"none","uid":1,"gid":2}],"netDevices":[{"hostInterfaceName":"eth1","name":"net0"}],"#,
        r#""hooks":[{"hookName":"createContainer","path":"/usr/bin/hook","args":["hook"],"env":["B="],"timeout":5}],"#,
        r#""mounts":[{"hostPath":"/opt/lib","containerPath":"/usr/lib/gpu","type":"none","options":["ro"]}],"#,
        r#""intelRdt":{"closID":"gold","schemata":["L3:0=f"],"enableMonitoring":true},"additionalGids":[44]}}]}"#,
        "\n",
    );
    assert_eq!(spec_line(&text(&claim(one(edits)))), golden);
}

#[test]
fn duplicate_names_are_numbered_in_order() {
    let gpu = |pool, value| device(pool, "gpu-0", with_env("POOL", value));
    let record = claim(PreparedClaim {
        devices: vec![
            gpu("a", "1"),
            device("a", "gpu-1", with_env("X", "y")),
            gpu("b", "2"),
            gpu("c", "3"),
        ],
        ..PreparedClaim::default()
    });
    let names: Vec<_> = spec(&record)
        .devices
        .into_iter()
        .map(|device| device.name)
        .collect();
    assert_eq!(names, ["c1-gpu-0", "c1-gpu-1", "c1-gpu-0.2", "c1-gpu-0.3"]);
    let qualified = cdi_devices(&record, &driver());
    assert_eq!(qualified[2].1, ["gpu.example.com/claim=c1-gpu-0.2"]);
    assert_eq!(qualified.len(), 4);
}

#[test]
fn native_cdi_names_need_no_file() {
    let mut native = device("a", "gpu-0", Edits::default());
    native.access = DeviceAccess::CdiDevices(vec![
        "vendor.com/gpu=0".to_owned(),
        "vendor.com/gpu=x".to_owned(),
    ]);
    let record = claim(PreparedClaim {
        devices: vec![native],
        ..PreparedClaim::default()
    });
    assert_eq!(render(&record), Ok(Vec::new()));
    let names: Vec<_> = cdi_devices(&record, &driver())
        .into_iter()
        .map(|(_, names)| names)
        .collect();
    assert_eq!(names, [["vendor.com/gpu=0", "vendor.com/gpu=x"]]);
}

#[test]
fn device_without_edits_names_its_claim() {
    let record = claim_with_uid("6f1c-a.b", one(Edits::default()));
    assert_eq!(
        spec(&record).devices[0].container_edits.env,
        [(
            "NODEDOCK_CLAIM_6F1C_A_B".to_owned(),
            "ml/train-gpu".to_owned()
        )]
    );
}

#[test]
fn claim_edits_without_device_are_refused() {
    let prepared = PreparedClaim {
        edits: with_env("A", "1"),
        ..PreparedClaim::default()
    };
    let error = render(&claim(prepared)).unwrap_err();
    assert!(
        matches!(error, RenderError::EditsWithoutDevice { .. }),
        "{error}"
    );
    let mut record = claim(PreparedClaim::default());
    assert_eq!(render(&record), Ok(Vec::new()));
    record.drivers.insert(driver(), Box::default());
    assert_eq!(render(&record), Ok(Vec::new()));
    assert!(cdi_devices(&record, &driver()).is_empty());
    assert!(matches!(
        render_driver(&record, &driver()),
        Err(RenderError::NotPrepared { .. })
    ));
}

#[test]
fn invalid_spec_is_not_rendered() {
    let hook = nodedock_model::Hook {
        stage: "whenever".to_owned(),
        path: "/bin/true".to_owned(),
        args: Vec::new(),
        env: Vec::new(),
        timeout_seconds: None,
    };
    let error = render(&claim(one(Edits {
        hooks: vec![hook],
        ..Edits::default()
    })))
    .unwrap_err();
    let text = nodedock_base::error::chain(&error);
    assert!(
        text.contains("gpu.example.com") && text.contains("whenever"),
        "{text}"
    );
}

/// Story: YAML 1.1 ends lines at U+0085, U+2028 and U+2029, which JSON leaves as they are. A driver's version with one of them
/// would leave the comment and write a spec of its own.
#[test]
fn no_text_leaves_its_line() {
    let evil = "1\u{2028}\u{85}\u{2029}\n\rcdiVersion: \"0.3.0\"\u{feff}\u{7f}😀é";
    let mut record = claim(one(with_env("EVIL", evil)));
    record
        .drivers
        .get_mut(&driver())
        .unwrap()
        .by
        .as_mut()
        .unwrap()
        .version = evil.to_owned();
    let text = text(&record);
    assert_eq!(text.lines().count(), 2);
    let ends = ['\u{85}', '\u{2028}', '\u{2029}', '\u{7f}', '\u{feff}', '\r'];
    assert!(!text.contains(ends), "{text:?}");
    assert_eq!(
        spec(&record).devices[0].container_edits.env,
        [("EVIL".to_owned(), evil.to_owned())]
    );
    let read: Spec = serde_saphyr::from_str(&text).unwrap();
    assert_eq!(read, spec(&record));
    let (first, _) = text.split_once('\n').unwrap();
    assert_eq!(
        super::identity::Identity::parse(first)
            .unwrap()
            .driver_version,
        evil
    );
}

#[test]
fn files_are_rebuilt_into_records() {
    let mut second = device(
        "b",
        "gpu-0",
        Edits {
            device_nodes: vec![node("/dev/g")],
            ..Edits::default()
        },
    );
    second.share_id = Some("s-1".to_owned());
    let record = claim(PreparedClaim {
        devices: vec![device("a", "gpu-0", Edits::default()), second],
        edits: with_env("ALL", "a=b"),
        ..PreparedClaim::default()
    });
    let (first, rest) = (text(&record), "nothing".to_owned());
    let (line, spec) = first.split_once('\n').unwrap();
    let ours = |name: &str, line: &str, spec: &str| OurFile {
        name: name.to_owned(),
        identity: super::identity::Identity::parse(line),
        spec: spec.to_owned(),
    };
    let files = [
        ours("a.yaml", line, spec),
        ours("b.yaml", "# nodedock.dev/claim: {", spec),
        ours("c.yaml", line, &rest),
    ];
    let Rebuilt { claims, unusable } = rebuild(files);
    assert_eq!(claims.len(), 1);
    assert_eq!(claims[&Uid::new("c1").unwrap()], record);

    let mut held = record;
    let hold = nodedock_model::KubeletHold {
        since_ms: 7,
        consumers: Vec::new(),
        given: true,
        early: false,
    };
    held.kubelet = Some(hold.clone());
    held.drivers.get_mut(&driver()).unwrap().kubelet = true;
    let mut written = held.clone();
    let pod = ObjectRef::new("ml", "train-0", "pod-1").unwrap();
    written.kubelet = Some(nodedock_model::KubeletHold {
        consumers: vec![nodedock_model::Consumer::of_pod(&pod)],
        ..hold
    });
    let written = text(&written);
    let (line, spec) = written.split_once('\n').unwrap();
    assert_eq!(
        rebuild([ours("a.yaml", line, spec)]).claims[&Uid::new("c1").unwrap()],
        held
    );
    assert_eq!(unusable.len(), 2);
    assert_eq!(unusable[0], ("b.yaml".to_owned(), RebuildError::Identity));
    assert!(matches!(unusable[1].1, RebuildError::Spec(_)));
}
