//! Permissions of the pod on its node: few, and each with a reason in `deploy/README.md`.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::objects::{base, deploy, one};

fn pod(objects: &[Value]) -> &Value {
    &one(objects, "DaemonSet")["spec"]["template"]["spec"]
}

fn container(objects: &[Value]) -> &Value {
    let containers = pod(objects)["containers"].as_array().unwrap();
    assert_eq!(containers.len(), 1);
    assert_eq!(pod(objects)["initContainers"], Value::Null);
    &containers[0]
}

#[test]
fn pod_has_minimal_capabilities_and_namespaces() {
    let objects = base();
    let security = &container(&objects)["securityContext"];
    assert_eq!(security["privileged"], false);
    assert_eq!(security["allowPrivilegeEscalation"], false);
    assert_eq!(security["readOnlyRootFilesystem"], true);
    assert_eq!(
        security["capabilities"],
        json!({"drop": ["ALL"], "add": ["DAC_OVERRIDE", "KILL", "SETUID", "SETGID"]})
    );
    for namespace in ["hostNetwork", "hostPID", "hostIPC"] {
        assert_eq!(pod(&objects)[namespace], Value::Null, "{namespace}");
    }
    assert_eq!(
        pod(&objects)["securityContext"]["seccompProfile"]["type"],
        "RuntimeDefault"
    );
    assert_eq!(container(&objects)["ports"], Value::Null, "no port is open");
}

#[test]
fn each_host_mount_is_documented() {
    let objects = base();
    let readme = std::fs::read_to_string(deploy().join("README.md")).unwrap();
    let mut of_the_node = BTreeSet::new();
    for volume in pod(&objects)["volumes"].as_array().unwrap() {
        if let Some(path) = volume["hostPath"]["path"].as_str() {
            of_the_node.insert(path.to_owned());
        }
    }
    let expected = [
        "/dev",
        "/sys",
        "/var/cache/nodedock",
        "/var/lib/kubelet/device-plugins",
        "/var/lib/kubelet/plugins",
        "/var/lib/kubelet/plugins_registry",
        "/var/lib/kubelet/pod-resources",
        "/var/lib/kubelet/pods-api",
        "/var/lib/nodedock",
        "/run/nodedock",
        "/var/run/cdi",
    ];
    assert_eq!(
        of_the_node,
        expected.iter().map(|path| (*path).to_owned()).collect()
    );
    for path in expected {
        let name = path.trim_start_matches("/var/lib/kubelet/");
        let name = if name == "/var/run/cdi" {
            "CDI directory"
        } else {
            name
        };
        assert!(readme.contains(name), "{name}");
    }
    let mounts = container(&objects)["volumeMounts"].as_array().unwrap();
    let is_read_only = |name: &str| {
        mounts
            .iter()
            .any(|m| m["name"] == name && m["readOnly"] == true)
    };
    assert!(
        ["dev", "pod-resources", "pods-api", "config"]
            .into_iter()
            .all(is_read_only)
    );
    // The kubelet receives paths of sockets, so they have to be the same within.
    for mount in mounts {
        let volume = pod(&objects)["volumes"]
            .as_array()
            .unwrap()
            .iter()
            .find(|v| v["name"] == mount["name"]);
        if let Some(path) = volume.unwrap()["hostPath"]["path"].as_str() {
            assert_eq!(mount["mountPath"], path);
        }
    }
}

#[test]
fn update_starts_new_pod_first() {
    let objects = base();
    let update = &one(&objects, "DaemonSet")["spec"]["updateStrategy"];
    assert_eq!(
        update,
        &json!({"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}})
    );
    let env = container(&objects)["env"].as_array().unwrap();
    let field = |name: &str| {
        let entry = env.iter().find(|entry| entry["name"] == name);
        entry.unwrap_or_else(|| panic!("{name} is not set"))["valueFrom"]["fieldRef"]["fieldPath"]
            .clone()
    };
    assert_eq!(field("NODEDOCK_NODE_NAME"), "spec.nodeName");
    assert_eq!(field("NODEDOCK_INSTANCE_UID"), "metadata.uid");
}

#[test]
fn probes_ask_the_program() {
    let objects = base();
    for (probe, question) in [
        ("startupProbe", "ready"),
        ("readinessProbe", "ready"),
        ("livenessProbe", "live"),
    ] {
        let command = &container(&objects)[probe]["exec"]["command"];
        assert_eq!(
            command,
            &json!(["/usr/bin/nodedockd", "probe", question]),
            "{probe}"
        );
    }
}

#[test]
fn role_has_no_wildcards_or_secrets() {
    let objects = base();
    let rules = one(&objects, "ClusterRole")["rules"].as_array().unwrap();
    for rule in rules {
        for field in ["apiGroups", "resources", "verbs"] {
            let names = rule[field].as_array().unwrap();
            assert!(
                !names.is_empty() && names.iter().all(|name| name != "*"),
                "{rule}"
            );
        }
        assert!(
            rule["resources"]
                .as_array()
                .unwrap()
                .iter()
                .all(|name| name != "secrets"),
            "{rule}"
        );
        assert_eq!(rule["nonResourceURLs"], Value::Null);
    }
}

/// The arguments and variables of the pod are those that the program takes.
#[test]
fn the_program_takes_the_pods_arguments() {
    let objects = base();
    let container = container(&objects);
    let help = std::process::Command::new(nodedock_tests::places::nodedockd())
        .args(["run", "--help"])
        .output()
        .unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    for argument in container["args"].as_array().unwrap().iter().skip(1) {
        let flag = argument.as_str().unwrap().split('=').next().unwrap();
        assert!(help.contains(flag), "{flag} is not in the help");
    }
    for entry in container["env"].as_array().unwrap() {
        let name = entry["name"].as_str().unwrap();
        // The others are there for those of ours, and the log's filter is read before there is a command line.
        let is_flag = name.starts_with("NODEDOCK_") && name != "NODEDOCK_LOG";
        assert!(!is_flag || help.contains(name), "{name} is not in the help");
    }
}
