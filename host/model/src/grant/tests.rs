use std::time::Duration;

use super::*;

const HEAD: &str = "apiVersion: nodedock.dev/v1\nkind: DriverGrant\n";

fn grant(body: &str) -> Grant {
    Grant::parse(&format!("{HEAD}{body}")).unwrap()
}

fn refusal(body: &str) -> String {
    Grant::parse(&format!("{HEAD}{body}"))
        .unwrap_err()
        .to_string()
}

fn strings(entries: &[&str]) -> Vec<String> {
    entries.iter().map(|entry| (*entry).to_owned()).collect()
}

#[test]
fn only_grant_header_is_required() {
    assert_eq!(grant(""), Grant::empty());
    let full = grant(
        "sysfsRead: [\"bus/pci/devices/*/vendor\"]\nsysfsWrite: [{glob: a/b, pattern: \"[0-9]+\"}]\ndeviceNodes: [/dev/fuse]\n\
         mounts: [/opt/acme/**, \"/var/lib/acme/*:rw\", \"/srv/acme:ro\"]\nhooks: [/usr/bin/acme-hook]\nenv: [\"ACME_*\"]\nnetDevices: [\"eth*\"]\n\
         driver: acme.example.com\nextendedResources: [\"acme.com/*\"]\ngroups: [44]\nrdtClasses: [acme]\nannotations: [\"acme.com/*\", io.example.x]\n\
         limits: {memoryMiB: 128, wallMs: 20000, cpuMs: 4000, answerMiB: 32, hostOperations: 200000, hostMiB: 64, \
         logLinesPerSecond: 100, logBytesPerSecond: 100000, concurrentCalls: 4}\n",
    );
    assert_eq!(
        full.allowed.sysfs_write,
        [ValueGrant {
            glob: "a/b".into(),
            pattern: "[0-9]+".into()
        }]
    );
    assert_eq!(
        full.allowed.mounts,
        ["/opt/acme/**", "/var/lib/acme/*", "/srv/acme"]
    );
    let unrequested = Unrequested {
        extended_resources: strings(&["acme.com/*"]),
        groups: vec![44],
        rdt_classes: strings(&["acme"]),
        annotations: strings(&["acme.com/*", "io.example.x"]),
        writable_mounts: strings(&["/var/lib/acme/*"]),
    };
    assert_eq!(full.unrequested, unrequested);
    assert_eq!(
        full.driver.as_ref().map(DriverName::as_str),
        Some("acme.example.com")
    );
    let values = [128, 20_000, 4000, 32, 200_000, 64, 100, 100_000, 4];
    assert_eq!(
        full.limits,
        LimitKey::ALL.iter().copied().zip(values).collect()
    );
}

#[test]
fn refused_grant_names_line_and_column() {
    for (body, place, reason) in [
        ("sysfsRaed: []\n", "line 3, column 1", "sysfsRaed"),
        (
            "sysfsRead:\n  - class/net\n  - /class/net\n",
            "line 5, column 5",
            "relative",
        ),
        ("deviceNodes: [dev/fuse]\n", "line 3, column 15", "absolute"),
        (
            "hooks: [/usr/bin/*]\n",
            "line 3, column 9",
            "without wildcards",
        ),
        (
            "env: [\"*\"]\n",
            "line 3, column 7",
            "prefix that ends in '_'",
        ),
        ("env: [\"ACME*\"]\n", "line 3, column 7", "exact name"),
        ("env: [\"_*\"]\n", "line 3, column 7", "exact name"),
        (
            "env: [\"{ACME_,LD_}*\"]\n",
            "line 3, column 7",
            "exact name",
        ),
        (
            "sysfsWrite: [{glob: \"a/*\", pattern: x}]\n",
            "line 3, column 21",
            "last segment",
        ),
        (
            "sysfsWrite: [{glob: \"class/net/**\", pattern: x}]\n",
            "line 3, column 21",
            "last segment",
        ),
        (
            "annotations: [\"*\"]\n",
            "line 3, column 15",
            "prefix that ends in '/'",
        ),
        (
            "annotations: [\"acme.com/a*\"]\n",
            "line 3, column 15",
            "exact key",
        ),
        (
            "extendedResources: [\"*\"]\n",
            "line 3, column 21",
            "DOMAIN/NAME",
        ),
        ("groups: [44, 0]\n", "line 3, column 14", "root"),
        ("groups: [video]\n", "line 3, column 10", ""),
        ("driver: acme_\n", "line 3, column 9", "driver"),
        ("mounts: [\"/opt/a:RW\"]\n", "line 3, column 10", ":rw"),
        ("mounts: [\"/opt/a:\"]\n", "line 3, column 10", ":rw"),
        ("mounts: [\"opt/a:rw\"]\n", "line 3, column 10", "absolute"),
        ("env: [\"a/b\"]\n", "line 3, column 7", "'/'"),
        (
            "sysfsWrite: [{glob: a, pattern: \"(\"}]\n",
            "line 3, column 33",
            "regular expression",
        ),
        ("limits: {memoryMiB: 100000}\n", "line 3, column 21", "512"),
        ("limits: {wallMs: 0}\n", "line 3, column 18", "wallMs"),
        ("limits: {cpuMs: lots}\n", "line 3, column 17", ""),
        (
            "limits: {answerMiB: 65}\n",
            "line 3, column 21",
            "answerMiB is 65, and 1 to 64",
        ),
        (
            "limits: {hostOperations: 1000001}\n",
            "line 3, column 26",
            "1 to 1000000",
        ),
        ("limits: {hostMiB: 129}\n", "line 3, column 19", "1 to 128"),
        (
            "limits: {logLinesPerSecond: 0}\n",
            "line 3, column 29",
            "1 to 1000",
        ),
        (
            "limits: {logBytesPerSecond: 1048577}\n",
            "line 3, column 29",
            "1 to 1048576",
        ),
        (
            "limits:\n  cpuMs: 1\n  concurrentCalls: 33\n",
            "line 5, column 20",
            "1 to 32",
        ),
        (
            "limits: {concurrentCall: 3}\n",
            "line 3, column 10",
            "concurrentCall",
        ),
        ("env: [\n", "line ", ""),
    ] {
        let text = refusal(body);
        assert!(
            text.contains(place) && text.contains(reason),
            "{body:?}: {text}"
        );
    }
    let foreign = Grant::parse("apiVersion: v1\nkind: DriverGrant\n")
        .unwrap_err()
        .to_string();
    assert!(
        foreign.contains("line 1, column 13") && foreign.contains("nodedock.dev/v1"),
        "{foreign}"
    );
    let kind = Grant::parse("apiVersion: nodedock.dev/v1\nkind: Pod\n")
        .unwrap_err()
        .to_string();
    assert!(
        kind.contains("line 2") && kind.contains("DriverGrant"),
        "{kind}"
    );
    assert!(Grant::parse("").is_err());
    assert!(Grant::parse(&" ".repeat(1 << 20)).is_err());
}

#[test]
fn lists_are_bounded() {
    let body = format!("env: [{}]\n", "A,".repeat(limit::GRANT_ENTRIES_MAX + 1));
    assert!(
        refusal(&body).contains("more than 64"),
        "{}",
        refusal(&body)
    );
}

#[test]
fn the_difference_is_readable() {
    let request = Capabilities {
        sysfs_read: strings(&["class/net/*", "class/drm/card0"]),
        sysfs_write: vec![ValueGrant {
            glob: "a/b".into(),
            pattern: "1".into(),
        }],
        device_nodes: strings(&["/dev/dri/*", "/dev/kvm"]),
        hooks: strings(&["/usr/bin/hook"]),
        env: strings(&["ACME_X", "LD_PRELOAD"]),
        ..Capabilities::default()
    };
    let limits = requested_limits(Some(128), Some(1000), None, None);
    assert_eq!(
        missing(
            &request,
            &limits,
            &grant("env: [\"ACME_*\"]\nsysfsRead: [class/drm/**]\ndeviceNodes: [\"/dev/**\"]\n")
        ),
        [
            "sysfsRead: class/net/*",
            "deviceNodes: /dev/kvm",
            "hooks: /usr/bin/hook",
            "env: LD_PRELOAD",
            "sysfsWrite: a/b with 1",
            "limits.memoryMiB: 128"
        ]
    );
    let all = to_yaml("acme.example.com", "two\nlines", &request, &limits);
    let granted = Grant::parse(&all).unwrap();
    assert_eq!(granted.allowed, request);
    assert_eq!(granted.limits, limits);
    assert!(missing(&request, &limits, &granted).is_empty());
}

#[test]
fn effective_needs_request_and_grant() {
    let request = Capabilities {
        sysfs_read: strings(&["class/net/*/address", "class/drm/*"]),
        sysfs_write: vec![ValueGrant {
            glob: "*/b".into(),
            pattern: "[0-9]".into(),
        }],
        device_nodes: strings(&["/dev/*"]),
        hooks: strings(&["/usr/bin/hook"]),
        env: strings(&["ACME_*", "LD_*", "PATH", "PYTHONPATH"]),
        net_devices: strings(&["eth*"]),
        ..Capabilities::default()
    };
    let body = "sysfsRead: [class/net/**]\nsysfsWrite: [{glob: a/b, pattern: \"[0-5]\"}]\ndeviceNodes: [\"/dev/*\", /dev/kvm]\n\
                hooks: [/usr/bin/hook]\nenv: [\"ACME_*\", \"LD_*\", PATH]\nnetDevices: [eth0]\n";
    let effective = Effective::new(&request, &grant(body)).unwrap();
    assert!(effective.allows_sysfs_read("class/net/eth0/address"));
    assert!(
        !effective.allows_sysfs_read("class/net/eth0/speed"),
        "granted, not asked for"
    );
    assert!(
        !effective.allows_sysfs_read("class/drm/card0"),
        "asked for, not granted"
    );
    assert!(effective.allows_sysfs_write("a/b", "3"));
    assert!(!effective.allows_sysfs_write("a/b", "7"));
    assert!(
        !effective.allows_sysfs_write("a/b", "33"),
        "the whole value is matched"
    );
    assert!(!effective.allows_sysfs_write("a/b", "3\n"));
    assert!(!effective.allows_sysfs_write("a/c", "3"));
    let node = |path: &str, naming| effective.allows_device_node(path, naming);
    assert!(node("/dev/kvm", Naming::Glob) && node("/dev/fuse", Naming::Glob));
    assert!(!node("/dev/vhost-net", Naming::Glob), "only by its name");
    assert!(node("/dev/kvm", Naming::Path) && !node("/dev/fuse", Naming::Path));
    assert!(effective.allows_env("PATH") && effective.allows_env("ACME_X"));
    assert!(!effective.allows_env("LD_PRELOAD") && !effective.allows_env("PYTHONPATH"));
    assert!(effective.allows_hook("/usr/bin/hook") && !effective.allows_hook("/usr/bin/other"));
    assert!(effective.allows_net_device("eth0") && !effective.allows_net_device("eth1"));
    assert!(!Effective::none().allows_env("A"));
}

/// All limits of a printed grant, including the proposed ones, are the effective defaults.
#[test]
fn printed_grant_proposes_effective_limits() {
    for asked in [
        LimitValues::new(),
        requested_limits(None, None, Some(500), None),
    ] {
        let printed = to_yaml("acme.example.com", "", &Capabilities::default(), &asked);
        let (head, limits) = printed.split_once("# Limits.").unwrap();
        let plain = |line: &str| line.strip_prefix("# ").unwrap_or(line).to_owned() + "\n";
        let in_force: String = limits.lines().skip(1).map(plain).collect();
        let whole = Grant::parse(&format!("{head}{in_force}")).unwrap();
        let bare = Grant::parse(&printed).unwrap();
        assert_eq!(bare.limits, asked);
        assert_eq!(
            Limits::new(&asked, &whole.limits),
            Limits::new(&asked, &bare.limits),
            "{printed}"
        );
        assert_eq!(whole.limits.len(), LimitKey::ALL.len(), "{printed}");
    }
}

#[test]
fn security_page_lists_every_limit() {
    let page = include_str!("../../../../docs/security.md");
    let rows: Vec<Vec<&str>> = page
        .lines()
        .map(|line| line.split('|').map(str::trim).collect())
        .collect();
    for limit in LimitKey::ALL {
        let (key, (default, max)) = (format!("`{limit}`"), limit.bounds());
        let row = rows
            .iter()
            .find(|row| row.get(1) == Some(&key.as_str()))
            .expect(&key);
        assert_eq!(row[3..5], [default.to_string(), max.to_string()], "{key}");
    }
}

#[test]
fn limits_stay_within_grant_and_ceiling() {
    let default = Limits::new(&LimitValues::new(), &LimitValues::new());
    let expected = Limits {
        memory: limit::CALL_MEMORY,
        wall: limit::CALL_WALL,
        cpu: limit::CALL_CPU,
        hostcall_bytes: limit::HOSTCALL_BYTES,
        host_operations: limit::HOST_OPERATIONS_PER_CALL,
        host_bytes: limit::HOST_BYTES_PER_CALL,
        log: LogRates {
            lines: limit::LOG_LINES_PER_SECOND,
            bytes: limit::LOG_BYTES_PER_SECOND,
        },
        concurrent_calls: limit::CALLS_PER_DRIVER,
    };
    assert_eq!(default, expected);
    assert_eq!(default.look_wall(), limit::LOOK_WALL);
    let greedy = requested_limits(Some(4096), Some(0), Some(1000), Some(2));
    let generous = LimitValues::from([
        (LimitKey::MemoryMiB, 9999),
        (LimitKey::WallMs, 20_000),
        (LimitKey::AnswerMiB, 9999),
        (LimitKey::ConcurrentCalls, 1),
    ]);
    let limits = Limits::new(&greedy, &generous);
    assert_eq!(limits.memory, limit::CALL_MEMORY_MAX);
    assert_eq!(limits.wall, Duration::from_millis(1));
    assert_eq!(limits.cpu, Duration::from_secs(1));
    assert_eq!(
        (limits.hostcall_bytes, limits.concurrent_calls),
        (limit::HOSTCALL_BYTES_MAX, 1)
    );
}

#[test]
fn withdrawn_capabilities_apply_to_all_owners() {
    let allowed = Capabilities {
        sysfs_read: strings(&["a/*", "a/b"]),
        sysfs_write: vec![ValueGrant {
            glob: "a/b".into(),
            pattern: "1".into(),
        }],
        host_files: strings(&["/opt/*"]),
        pci_driver: vec![ValueGrant {
            glob: "0000:00:04.0".into(),
            pattern: "vfio-pci".into(),
        }],
        device_nodes: strings(&["/dev/a"]),
        mounts: strings(&["/opt/a"]),
        hooks: strings(&["/usr/bin/a"]),
        env: strings(&["A"]),
        net_devices: strings(&["eth0"]),
    };
    let unrequested = Unrequested {
        extended_resources: strings(&["a.com/b"]),
        groups: vec![7],
        rdt_classes: strings(&["c"]),
        annotations: strings(&["a.com/k"]),
        writable_mounts: strings(&["/opt/a"]),
    };
    let grant = Grant {
        allowed: allowed.clone(),
        unrequested,
        ..Grant::default()
    };
    let effective = Effective::new(&allowed, &grant).unwrap();
    let allows = || {
        [
            effective.allows_sysfs_read("a/b"),
            effective.allows_sysfs_glob("a/*"),
            effective.allows_sysfs_write("a/b", "1"),
            effective.allows_host_file("/opt/a", Naming::Glob),
            effective.allows_host_files_glob("/opt/*"),
            effective.allows_bind("0000:00:04.0", "vfio-pci"),
            effective.allows_device_node("/dev/a", Naming::Path),
            effective.allows_device_nodes_glob("/dev/a"),
            effective.allows_mount("/opt/a", Naming::Path),
            effective.allows_writable_mount("/opt/a", Naming::Path),
            effective.allows_extended_resource("a.com/b"),
            effective.allows_group(7),
            effective.allows_rdt_class("c"),
            effective.allows_annotation("a.com/k"),
            effective.names_sysfs_read("a/b"),
            effective.allows_hook("/usr/bin/a"),
            effective.allows_env("A"),
            effective.allows_net_device("eth0"),
        ]
    };
    assert_eq!(allows(), [true; 18]);
    effective.revoke();
    assert_eq!(allows(), [false; 18]);
}

#[test]
fn rules_without_any_read_are_found() {
    let rules = strings(&["class/net/**", "class/drm/*/device"]);
    let read = |texts: &[&str]| texts.iter().map(ToString::to_string).collect();
    assert_eq!(
        unused(&rules, &read(&["class/net/*/address", "class/block/sda"])),
        ["class/drm/*/device"]
    );
    assert!(
        unused(
            &rules,
            &read(&["class/net", "class/net/eth0", "class/drm/card0/device"])
        )
        .is_empty()
    );
    assert_eq!(unused(&rules, &read(&[])).len(), 2);
}

#[test]
fn runtime_annotations_need_exact_keys() {
    let body = "annotations: [\"acme.com/*\", \"devices.nri.io/*\", \"containerd.io/*\", run.oci.keep_original_groups, devices.nri.io/container.a]\n";
    let effective = Effective::new(&Capabilities::default(), &grant(body)).unwrap();
    for key in [
        "acme.com/x",
        "run.oci.keep_original_groups",
        "devices.nri.io/container.a",
    ] {
        assert!(effective.allows_annotation(key), "{key}");
    }
    for key in [
        "acme.com.evil/x",
        "devices.nri.io/container.b",
        "run.oci.hooks.stdout",
        "io.kubernetes.cri-o.Devices",
        "io.katacontainers.config.hypervisor.path",
        "other.com/x",
    ] {
        assert!(!effective.allows_annotation(key), "{key}");
    }
}

#[test]
fn path_beyond_globs_is_missing() {
    let request = Capabilities {
        mounts: strings(&["/usr/bin/acme", "/opt/acme/**", "/etc/acme/conf"]),
        host_files: strings(&["/etc/acme/list"]),
        ..Capabilities::default()
    };
    let wide = grant("mounts: [\"/**\"]\nhostFiles: [\"/**\"]\n");
    assert_eq!(
        missing(&request, &LimitValues::new(), &wide),
        [
            "hostFiles: /etc/acme/list",
            "mounts: /usr/bin/acme",
            "mounts: /etc/acme/conf"
        ]
    );
    let named = grant(
        "mounts: [/usr/bin/acme, \"/opt/**\", \"/etc/acme/*\"]\nhostFiles: [\"/etc/acme/**\"]\n",
    );
    assert!(missing(&request, &LimitValues::new(), &named).is_empty());
}
