//! The chart, by Helm itself: with its defaults it is the kustomize base, its other values make what they say, bad ones are refused.

use std::path::{Path, PathBuf};
use std::process::Command;

use nodedock_tests::machine::{program, skip};
use serde_json::{Value, json};

use crate::objects::{base, defects, deploy, of_kind, one, parse};

/// Finds a tool in the PATH, or in the directory to which the set-up of the tests installs it.
fn tool(name: &str) -> Option<PathBuf> {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../target/deploy-tools")
        .join(name);
    if own.is_file() {
        return Some(own);
    }
    let found = program(name);
    if found.is_none() {
        skip(
            &format!("the deployment as {name} makes it"),
            &format!("{name} is not installed"),
        );
    }
    found
}

/// Renders the chart by Helm with these values, in the release and namespace `nodedock`.
fn render(helm: &Path, values: &str) -> Result<String, String> {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("values.yaml");
    std::fs::write(&file, values).unwrap();
    let mut command = Command::new(helm);
    command
        .args(["template", "nodedock"])
        .arg(deploy().join("chart/nodedock"));
    command
        .args([
            "--namespace",
            "nodedock",
            "--kube-version",
            "1.36.0",
            "--values",
        ])
        .arg(&file);
    // It keeps nothing of this in the home directory of this user.
    for variable in ["HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"] {
        command.env(variable, dir.path());
    }
    let output = command.output().unwrap();
    match output.status.success() {
        true => Ok(String::from_utf8(output.stdout).unwrap()),
        false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
    }
}

/// Objects by kind and name, without what only Helm says of itself.
fn comparable(objects: Vec<Value>) -> Vec<(String, Value)> {
    fn strip(value: &mut Value) {
        match value {
            Value::Object(map) => {
                map.remove("helm.sh/chart");
                map.remove("app.kubernetes.io/managed-by");
                map.values_mut().for_each(strip);
            }
            Value::Array(list) => list.iter_mut().for_each(strip),
            _ => {}
        }
    }
    let mut named: Vec<_> = objects
        .into_iter()
        .filter(|object| object["kind"] != "Namespace")
        .map(|mut object| {
            strip(&mut object);
            (
                format!("{} {}", object["kind"], object["metadata"]["name"]),
                object,
            )
        })
        .collect();
    named.sort_by(|a, b| a.0.cmp(&b.0));
    named
}

#[test]
fn default_chart_equals_the_base() {
    let Some(helm) = tool("helm") else { return };
    let chart = comparable(parse(&render(&helm, "").unwrap()));
    let base = comparable(base());
    let names = |objects: &[(String, Value)]| {
        objects
            .iter()
            .map(|(name, _)| name.clone())
            .collect::<Vec<_>>()
    };
    assert_eq!(names(&chart), names(&base));
    for ((name, of_chart), (_, of_base)) in chart.iter().zip(&base) {
        assert_eq!(of_chart, of_base, "{name}");
    }
}

#[test]
fn chart_values_give_valid_api_objects() {
    let Some(helm) = tool("helm") else { return };
    let sets = [
        "fullnameOverride: docks",
        "nameOverride: docks",
        "metrics: {enabled: true, podMonitor: {enabled: true, labels: {team: a}}, networkPolicy: {from: []}}",
        "metrics: {enabled: true, networkPolicy: {apiServer: [{ipBlock: {cidr: 10.0.0.1/32}}]}}",
        "metrics: {networkPolicy: {enabled: false}}",
        "admissionPolicy: {enabled: false}",
        "image: {digest: \"sha256:0000000000000000000000000000000000000000000000000000000000000000\"}",
        "imagePullSecrets: [{name: pull}]\nserviceAccount: {annotations: {a: b}}",
        "driversDir: /opt/drivers\ncdiDir: /run/cdi\nkubeletRoot: /data/kubelet",
        "config: {claims: {callDeadlineMs: 5000}, trust: {mode: warn}}",
        "updateStrategy: {maxSurge: 10%}\nnodeSelector: {gpu: \"yes\"}\ntolerations: []\naffinity: {nodeAffinity: {}}",
        "podAnnotations: {a: b}\npodLabels: {c: d}",
        "drivers: [{name: a, image: \"r/a:1\", allowTag: true, pullPolicy: Always, subPath: drivers/a}]",
        DRIVERS,
        "rbac: {pods: false, deviceClasses: false}",
        "config: {kubernetes: {extendedResources: device-plugin, bindingConditions: [{driver: gpu.example.com}]}}",
    ];
    for values in sets {
        let objects =
            parse(&render(&helm, values).unwrap_or_else(|error| panic!("{values}: {error}")));
        let wrong: Vec<_> = objects.iter().flat_map(defects).collect();
        assert!(wrong.is_empty(), "{values}: {wrong:#?}");
    }
}

#[test]
fn values_arrive_where_they_belong() {
    let Some(helm) = tool("helm") else { return };
    let rendered = |values: &str| parse(&render(&helm, values).unwrap());
    let metrics = rendered(
        "metrics: {enabled: true, port: 9401, podMonitor: {enabled: true}}\nconfig: {trust: {mode: warn}}",
    );
    let config = &one(&metrics, "ConfigMap")["data"]["config.yaml"];
    let config = parse(config.as_str().unwrap()).remove(0);
    assert_eq!(config["admin"]["listen"], "0.0.0.0:9401");
    assert_eq!(config["trust"]["mode"], "warn");
    let pod = &one(&metrics, "DaemonSet")["spec"]["template"]["spec"];
    assert_eq!(pod["containers"][0]["ports"][0]["containerPort"], 9401);
    assert_eq!(
        one(&metrics, "PodMonitor")["spec"]["podMetricsEndpoints"][0]["port"],
        "metrics"
    );

    let elsewhere = rendered(
        "kubeletRoot: /data/kubelet\ndriversDir: /opt/drivers\nadmissionPolicy: {enabled: false}",
    );
    let pod = one(&elsewhere, "DaemonSet")["spec"]["template"]["spec"].to_string();
    // A kubelet's directory of device plugins does not follow its root; the pod has it where the other directories are.
    let fixed = r#""path":"/var/lib/kubelet/device-plugins""#;
    assert!(
        pod.contains(fixed) && !pod.replace(fixed, "").contains("/var/lib/kubelet"),
        "{pod}"
    );
    assert!(
        pod.contains(r#""mountPath":"/data/kubelet/device-plugins""#),
        "{pod}"
    );
    assert!(
        pod.contains("--kubelet-root=/data/kubelet") && pod.contains("\"/opt/drivers\""),
        "{pod}"
    );
    assert!(of_kind(&elsewhere, "ValidatingAdmissionPolicy").is_empty());
    let role = |values: &str| one(&rendered(values), "ClusterRole")["rules"].to_string();
    for (right, resource) in [("pods", "\"pods\""), ("deviceClasses", "deviceclasses")] {
        assert!(role(&format!("rbac: {{{right}: true}}")).contains(resource));
        assert!(!role(&format!("rbac: {{{right}: false}}")).contains(resource));
    }
    let digest = format!("sha256:{}", "0".repeat(64));
    let pinned = rendered(&format!("image: {{digest: \"{digest}\", tag: ignored}}"));
    let image = &one(&pinned, "DaemonSet")["spec"]["template"]["spec"]["containers"][0]["image"];
    assert_eq!(image, &format!("ghcr.io/nodedock/nodedock@{digest}"));
}

#[test]
fn bad_values_are_refused_by_name() {
    let Some(helm) = tool("helm") else { return };
    for (values, named) in [
        ("imag: {}", "imag"),
        ("image: {digest: latest}", "digest"),
        ("kubeletRoot: var/lib/kubelet", "kubeletRoot"),
        ("metrics: {port: 70000}", "port"),
        ("config: {admin: {listen: x}}", "config"),
        (
            "terminationGracePeriodSeconds: 5",
            "terminationGracePeriodSeconds",
        ),
        ("updateStrategy: {maxSurge: 0}", "maxSurge"),
        ("rbac: {pods: none}", "pods"),
        ("metrics: {podMonitor: {enabled: true}}", "metrics.enabled"),
        ("config: {driverImages: []}", "config"),
        ("config: {kubernetes: {enabled: false}}", "kubernetes"),
        ("config: {kubernetes: {kubeletRoot: /k}}", "kubernetes"),
        ("drivers: [{name: gpu}]", "image"),
        ("drivers: [{image: a}]", "name"),
        ("drivers: [{name: Gpu, image: a}]", "name"),
        ("drivers: [{name: gpu.v1, image: a}]", "name"),
        (
            "drivers: [{name: gpu, image: a, pullPolicy: Sometimes}]",
            "pullPolicy",
        ),
        (
            "drivers: [{name: gpu, image: a, allowTag: true, subPath: /a}]",
            "subPath",
        ),
        (
            "drivers: [{name: gpu, image: a, allowTag: true, grant: [a]}]",
            "grant",
        ),
        ("drivers: [{name: gpu, image: a, grnt: {}}]", "grnt"),
    ] {
        let error = render(&helm, values).expect_err(values);
        assert!(error.contains(named), "{values}: {error}");
    }
}

/// Two drivers: the one of the kustomize example, and one whose side files are objects.
const DRIVERS: &str = "
drivers:
- name: gpu
  image: registry.example.com/gpu-driver@sha256:0000000000000000000000000000000000000000000000000000000000000000
  grant: |
    apiVersion: nodedock.dev/v1
    kind: DriverGrant
    env:
    - GPU_*
  config: |
    pools: []
- name: nic
  image: localhost:5000/nic:1.0@sha256:1111111111111111111111111111111111111111111111111111111111111111
  pullPolicy: Always
  subPath: drivers/nic
  grant: {apiVersion: nodedock.dev/v1, kind: DriverGrant}
  config: {pools: [{name: nics}]}
";

#[test]
fn driver_is_an_image_volume() {
    let Some(helm) = tool("helm") else { return };
    let objects = parse(&render(&helm, DRIVERS).unwrap());
    let data = &one(&objects, "ConfigMap")["data"];
    let config = parse(data["config.yaml"].as_str().unwrap()).remove(0);
    let entry = |name: &str| json!({"name": name, "directory": format!("/drivers/{name}")});
    assert_eq!(config["driverImages"], json!([entry("gpu"), entry("nic")]));
    assert_eq!(
        data["gpu.grant.yaml"],
        "apiVersion: nodedock.dev/v1\nkind: DriverGrant\nenv:\n- GPU_*\n"
    );
    assert_eq!(data["gpu.config.yaml"], "pools: []\n");
    let nic = |kind: &str| parse(data[format!("nic.{kind}.yaml")].as_str().unwrap()).remove(0);
    assert_eq!(
        nic("grant"),
        json!({"apiVersion": "nodedock.dev/v1", "kind": "DriverGrant"})
    );
    assert_eq!(nic("config"), json!({"pools": [{"name": "nics"}]}));
    assert_eq!(data.as_object().unwrap().len(), 5);

    let pod = &one(&objects, "DaemonSet")["spec"]["template"]["spec"];
    let by_name = |list: &Value, name: &str| {
        let found = list
            .as_array()
            .unwrap()
            .iter()
            .find(|entry| entry["name"] == name);
        found.unwrap_or_else(|| panic!("{name} in {list}")).clone()
    };
    let image = |name: &str| by_name(&pod["volumes"], name)["image"].clone();
    let (gpu, nic) = ("0".repeat(64), "1".repeat(64));
    let gpu = format!("registry.example.com/gpu-driver@sha256:{gpu}");
    assert_eq!(
        image("driver-gpu"),
        json!({"reference": gpu, "pullPolicy": "IfNotPresent"})
    );
    let nic = format!("localhost:5000/nic:1.0@sha256:{nic}");
    assert_eq!(
        image("driver-nic"),
        json!({"reference": nic, "pullPolicy": "Always"})
    );
    let mounts = &pod["containers"][0]["volumeMounts"];
    let gpu = json!({"name": "driver-gpu", "mountPath": "/drivers/gpu", "readOnly": true});
    assert_eq!(by_name(mounts, "driver-gpu"), gpu);
    assert_eq!(by_name(mounts, "driver-nic")["subPath"], "drivers/nic");

    let without = render(&helm, "").unwrap();
    assert!(
        !without.contains("driverImages") && !without.contains("image: {reference"),
        "{without}"
    );
}

/// A driver without a grant is shown as blocked, with what it requests.
#[test]
fn unset_side_files_are_not_created() {
    let Some(helm) = tool("helm") else { return };
    let objects =
        parse(&render(&helm, "drivers: [{name: a, image: r/a, allowTag: true}]").unwrap());
    let data = one(&objects, "ConfigMap")["data"].as_object().unwrap();
    assert_eq!(data.keys().collect::<Vec<_>>(), ["config.yaml"]);
}

#[test]
fn unpinned_image_is_refused_by_default() {
    let Some(helm) = tool("helm") else { return };
    let digest = |length: usize| format!("sha256:{}", "0".repeat(length));
    for image in [
        "r/gpu",
        "r/gpu:1.0",
        &format!("r/gpu@{}", digest(63)),
        &format!("r/gpu@{}x", digest(64)),
    ] {
        let values = |more: &str| format!("drivers: [{{name: gpu, image: \"{image}\"{more}}}]");
        let error = render(&helm, &values("")).expect_err(image);
        assert!(
            error.contains("drivers[0].image") && error.contains("driver gpu"),
            "{error}"
        );
        assert!(
            error.contains("REPOSITORY@sha256:DIGEST") && error.contains("allowTag"),
            "{error}"
        );
        render(&helm, &values(", allowTag: true")).unwrap();
    }
    let twice = format!("{{name: gpu, image: \"r/gpu@{}\"}}", digest(64));
    let error =
        render(&helm, &format!("drivers: [{twice}, {twice}]")).expect_err("two of one name");
    assert!(
        error.contains("drivers[1].name") && error.contains("gpu"),
        "{error}"
    );
}

/// The image of a driver is part of the pod's template: a DaemonSet replaces its pods when that changes, the new one first.
#[test]
fn only_digest_changes_the_pod_template() {
    let Some(helm) = tool("helm") else { return };
    let template = |values: &str| {
        let objects = parse(&render(&helm, values).unwrap());
        one(&objects, "DaemonSet")["spec"]["template"].clone()
    };
    let first = template(DRIVERS);
    assert_ne!(
        first,
        template(&DRIVERS.replace(&"0".repeat(64), &"2".repeat(64)))
    );
    assert_eq!(first, template(&DRIVERS.replace("GPU_*", "GPU_A")));
}

/// Objects in which the order of volumes and mounts does not count.
fn unordered(objects: Vec<Value>) -> Vec<(String, Value)> {
    fn sort(value: &mut Value) {
        match value {
            Value::Object(map) => {
                for (key, value) in map {
                    sort(value);
                    if let ("volumes" | "volumeMounts", Value::Array(list)) = (key.as_str(), value)
                    {
                        list.sort_by_key(|entry| entry["name"].to_string());
                    }
                }
            }
            Value::Array(list) => list.iter_mut().for_each(sort),
            _ => {}
        }
    }
    let mut named = comparable(objects);
    named.iter_mut().for_each(|(_, object)| sort(object));
    named
}

#[test]
fn kustomize_example_equals_the_chart() {
    let (Some(helm), Some(kustomize)) = (tool("helm"), tool("kustomize")) else {
        return;
    };
    let example = deploy().join("kustomize/driver-image");
    let output = Command::new(kustomize)
        .arg("build")
        .arg(&example)
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let built = parse(std::str::from_utf8(&output.stdout).unwrap());
    let wrong: Vec<_> = built.iter().flat_map(defects).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
    let gpu = DRIVERS.split("- name: nic").next().unwrap();
    assert_eq!(
        unordered(built),
        unordered(parse(&render(&helm, gpu).unwrap()))
    );
}

#[test]
fn kustomize_builds_the_base() {
    let Some(kustomize) = tool("kustomize") else {
        return;
    };
    let output = Command::new(kustomize)
        .arg("build")
        .arg(deploy().join("kustomize/base"))
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let built = comparable(parse(std::str::from_utf8(&output.stdout).unwrap()));
    assert_eq!(built, comparable(base()));
}
