use std::time::Duration;

use super::*;

const HEAD: &str = "apiVersion: nodedock.dev/v1\nkind: DriverGrant\n";

fn grant(body: &str) -> Grant {
    Grant::parse(&format!("{HEAD}{body}")).unwrap()
}

fn refusal(body: &str) -> String {
    Grant::parse(&format!("{HEAD}{body}")).unwrap_err().to_string()
}

fn strings(entries: &[&str]) -> Vec<String> {
    entries.iter().map(|entry| (*entry).to_owned()).collect()
}

#[test]
fn every_key_but_the_head_is_optional() {
    assert_eq!(grant(""), Grant::empty());
    let full = grant(
        "sysfsRead: [\"bus/pci/devices/*/vendor\"]\nsysfsWrite: [{glob: a/b, pattern: \"[0-9]+\"}]\ndeviceNodes: [/dev/fuse]\n\
         mounts: [/opt/acme/**]\nhooks: [/usr/bin/acme-hook]\nenv: [\"ACME_*\"]\nnetDevices: [\"eth*\"]\n\
         limits: {memoryMiB: 128, wallMs: 20000, cpuMs: 4000, answerMiB: 32, hostOperations: 200000, hostMiB: 64, \
         logLinesPerSecond: 100, logBytesPerSecond: 100000, concurrentCalls: 4}\n",
    );
    assert_eq!(full.allowed.sysfs_write, [ValueGrant { glob: "a/b".into(), pattern: "[0-9]+".into() }]);
    let values = [128, 20_000, 4000, 32, 200_000, 64, 100, 100_000, 4];
    assert_eq!(full.limits, LimitKey::ALL.iter().copied().zip(values).collect());
}

#[test]
fn a_refused_file_names_line_and_column() {
    for (body, place, reason) in [
        ("sysfsRaed: []\n", "line 3, column 1", "sysfsRaed"),
        ("sysfsRead:\n  - class/net\n  - /class/net\n", "line 5, column 5", "relative"),
        ("deviceNodes: [dev/fuse]\n", "line 3, column 15", "absolute"),
        ("hooks: [/usr/bin/*]\n", "line 3, column 9", "without wildcards"),
        ("env: [\"a/b\"]\n", "line 3, column 7", "'/'"),
        ("sysfsWrite: [{glob: a, pattern: \"(\"}]\n", "line 3, column 33", "regular expression"),
        ("limits: {memoryMiB: 100000}\n", "line 3, column 21", "512"),
        ("limits: {wallMs: 0}\n", "line 3, column 18", "wallMs"),
        ("limits: {cpuMs: lots}\n", "line 3, column 17", ""),
        ("limits: {answerMiB: 65}\n", "line 3, column 21", "answerMiB is 65, and 1 to 64"),
        ("limits: {hostOperations: 1000001}\n", "line 3, column 26", "1 to 1000000"),
        ("limits: {hostMiB: 129}\n", "line 3, column 19", "1 to 128"),
        ("limits: {logLinesPerSecond: 0}\n", "line 3, column 29", "1 to 1000"),
        ("limits: {logBytesPerSecond: 1048577}\n", "line 3, column 29", "1 to 1048576"),
        ("limits:\n  cpuMs: 1\n  concurrentCalls: 33\n", "line 5, column 20", "1 to 32"),
        ("limits: {concurrentCall: 3}\n", "line 3, column 10", "concurrentCall"),
        ("env: [\n", "line ", ""),
    ] {
        let text = refusal(body);
        assert!(text.contains(place) && text.contains(reason), "{body:?}: {text}");
    }
    let foreign = Grant::parse("apiVersion: v1\nkind: DriverGrant\n").unwrap_err().to_string();
    assert!(foreign.contains("line 1, column 13") && foreign.contains("nodedock.dev/v1"), "{foreign}");
    let kind = Grant::parse("apiVersion: nodedock.dev/v1\nkind: Pod\n").unwrap_err().to_string();
    assert!(kind.contains("line 2") && kind.contains("DriverGrant"), "{kind}");
    assert!(Grant::parse("").is_err());
    assert!(Grant::parse(&" ".repeat(1 << 20)).is_err());
}

#[test]
fn lists_are_bounded() {
    let body = format!("env: [{}]\n", "A,".repeat(limit::GRANT_ENTRIES_MAX + 1));
    assert!(refusal(&body).contains("more than 64"), "{}", refusal(&body));
}

#[test]
fn the_difference_is_readable() {
    let request = Capabilities {
        sysfs_read: strings(&["class/net/*", "class/drm/card0"]),
        sysfs_write: vec![ValueGrant { glob: "a/b".into(), pattern: "1".into() }],
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
            &grant("env: [\"*\"]\nsysfsRead: [class/drm/**]\ndeviceNodes: [\"/dev/**\"]\n")
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
fn allowed_is_what_is_asked_for_and_granted() {
    let request = Capabilities {
        sysfs_read: strings(&["class/net/*/address", "class/drm/*"]),
        sysfs_write: vec![ValueGrant { glob: "a/*".into(), pattern: "[0-9]".into() }],
        device_nodes: strings(&["/dev/*"]),
        hooks: strings(&["/usr/bin/hook"]),
        env: strings(&["*"]),
        net_devices: strings(&["eth*"]),
        ..Capabilities::default()
    };
    let body = "sysfsRead: [class/net/**]\nsysfsWrite: [{glob: a/b, pattern: \"[0-5]\"}]\ndeviceNodes: [\"/dev/*\", /dev/kvm]\n\
                hooks: [/usr/bin/hook]\nenv: [\"*\", PATH]\nnetDevices: [eth0]\n";
    let effective = Effective::new(&request, &grant(body)).unwrap();
    assert!(effective.allows_sysfs_read("class/net/eth0/address"));
    assert!(!effective.allows_sysfs_read("class/net/eth0/speed"), "granted, not asked for");
    assert!(!effective.allows_sysfs_read("class/drm/card0"), "asked for, not granted");
    assert!(effective.allows_sysfs_write("a/b", "3"));
    assert!(!effective.allows_sysfs_write("a/b", "7"));
    assert!(!effective.allows_sysfs_write("a/b", "33"), "the whole value is matched");
    assert!(!effective.allows_sysfs_write("a/b", "3\n"));
    assert!(!effective.allows_sysfs_write("a/c", "3"));
    assert!(effective.allows_device_node("/dev/kvm") && effective.allows_device_node("/dev/fuse"));
    assert!(!effective.allows_device_node("/dev/vhost-net"), "only by its name");
    assert!(effective.allows_env("PATH") && effective.allows_env("ACME"));
    assert!(!effective.allows_env("LD_PRELOAD") && !effective.allows_env("PYTHONPATH"));
    assert!(effective.allows_hook("/usr/bin/hook") && !effective.allows_hook("/usr/bin/other"));
    assert!(effective.allows_net_device("eth0") && !effective.allows_net_device("eth1"));
    assert!(!Effective::none().allows_env("A"));
}

/// All limits of a printed grant, including the proposed ones, are the effective defaults.
#[test]
fn a_printed_grant_proposes_the_limits_that_apply_anyway() {
    for asked in [LimitValues::new(), requested_limits(None, None, Some(500), None)] {
        let printed = to_yaml("acme.example.com", "", &Capabilities::default(), &asked);
        let (head, limits) = printed.split_once("# Limits.").unwrap();
        let plain = |line: &str| line.strip_prefix("# ").unwrap_or(line).to_owned() + "\n";
        let in_force: String = limits.lines().skip(1).map(plain).collect();
        let whole = Grant::parse(&format!("{head}{in_force}")).unwrap();
        let bare = Grant::parse(&printed).unwrap();
        assert_eq!(bare.limits, asked);
        assert_eq!(Limits::new(&asked, &whole.limits), Limits::new(&asked, &bare.limits), "{printed}");
        assert_eq!(whole.limits.len(), LimitKey::ALL.len(), "{printed}");
    }
}

#[test]
fn the_page_on_security_tells_every_limit_of_a_grant() {
    let page = include_str!("../../../../docs/security.md");
    let rows: Vec<Vec<&str>> = page.lines().map(|line| line.split('|').map(str::trim).collect()).collect();
    for limit in LimitKey::ALL {
        let (key, (default, max)) = (format!("`{limit}`"), limit.bounds());
        let row = rows.iter().find(|row| row.get(1) == Some(&key.as_str())).expect(&key);
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
        log: LogRates { lines: limit::LOG_LINES_PER_SECOND, bytes: limit::LOG_BYTES_PER_SECOND },
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
    assert_eq!((limits.hostcall_bytes, limits.concurrent_calls), (limit::HOSTCALL_BYTES_MAX, 1));
}

#[test]
fn withdrawn_capabilities_are_withdrawn_for_every_owner() {
    let allowed = Capabilities {
        sysfs_read: strings(&["a/*"]),
        sysfs_write: vec![ValueGrant { glob: "a/b".into(), pattern: "1".into() }],
        host_files: strings(&["/opt/*"]),
        pci_driver: vec![ValueGrant { glob: "0000:00:04.0".into(), pattern: "vfio-pci".into() }],
        device_nodes: strings(&["/dev/a"]),
        mounts: strings(&["/opt/a"]),
        hooks: strings(&["/usr/bin/a"]),
        env: strings(&["A"]),
        net_devices: strings(&["eth0"]),
    };
    let grant = Grant { allowed: allowed.clone(), limits: LimitValues::new() };
    let effective = Effective::new(&allowed, &grant).unwrap();
    let allows = || {
        [
            effective.allows_sysfs_read("a/b"),
            effective.allows_sysfs_glob("a/*"),
            effective.allows_sysfs_write("a/b", "1"),
            effective.allows_host_file("/opt/a"),
            effective.allows_host_files_glob("/opt/*"),
            effective.allows_bind("0000:00:04.0", "vfio-pci"),
            effective.allows_device_node("/dev/a"),
            effective.allows_device_nodes_glob("/dev/a"),
            effective.allows_mount("/opt/a"),
            effective.allows_hook("/usr/bin/a"),
            effective.allows_env("A"),
            effective.allows_net_device("eth0"),
        ]
    };
    assert_eq!(allows(), [true; 12]);
    effective.revoke();
    assert_eq!(allows(), [false; 12]);
}

#[test]
fn rules_that_cover_nothing_that_was_read_are_found() {
    let rules = strings(&["class/net/**", "class/drm/*/device"]);
    let read = |texts: &[&str]| texts.iter().map(ToString::to_string).collect();
    assert_eq!(unused(&rules, &read(&["class/net/*/address", "class/block/sda"])), ["class/drm/*/device"]);
    assert!(unused(&rules, &read(&["class/net", "class/net/eth0", "class/drm/card0/device"])).is_empty());
    assert_eq!(unused(&rules, &read(&[])).len(), 2);
}
