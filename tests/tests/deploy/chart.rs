//! The chart, by Helm itself: with its defaults it is the kustomize base, its other values make what they say, bad ones are refused.

use std::path::{Path, PathBuf};
use std::process::Command;

use nodedock_tests::machine::{program, skip};
use serde_json::Value;

use crate::objects::{base, defects, deploy, of_kind, one, parse};

/// In the PATH, or where the set-up of the tests puts it.
fn tool(name: &str) -> Option<PathBuf> {
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/deploy-tools").join(name);
    if own.is_file() {
        return Some(own);
    }
    let found = program(name);
    if found.is_none() {
        skip(&format!("the deployment as {name} makes it"), &format!("{name} is not installed"));
    }
    found
}

/// What Helm makes of the chart with these values, in the release and namespace `nodedock`.
fn render(helm: &Path, values: &str) -> Result<String, String> {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("values.yaml");
    std::fs::write(&file, values).unwrap();
    let mut command = Command::new(helm);
    command.args(["template", "nodedock"]).arg(deploy().join("chart/nodedock"));
    command.args(["--namespace", "nodedock", "--kube-version", "1.36.0", "--values"]).arg(&file);
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
            (format!("{} {}", object["kind"], object["metadata"]["name"]), object)
        })
        .collect();
    named.sort_by(|a, b| a.0.cmp(&b.0));
    named
}

#[test]
fn with_its_defaults_the_chart_is_the_base() {
    let Some(helm) = tool("helm") else { return };
    let chart = comparable(parse(&render(&helm, "").unwrap()));
    let base = comparable(base());
    let names =
        |objects: &[(String, Value)]| objects.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
    assert_eq!(names(&chart), names(&base));
    for ((name, of_chart), (_, of_base)) in chart.iter().zip(&base) {
        assert_eq!(of_chart, of_base, "{name}");
    }
}

#[test]
fn every_value_makes_what_the_api_knows() {
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
    ];
    for values in sets {
        let objects = parse(&render(&helm, values).unwrap_or_else(|error| panic!("{values}: {error}")));
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
    assert_eq!(one(&metrics, "PodMonitor")["spec"]["podMetricsEndpoints"][0]["port"], "metrics");

    let elsewhere =
        rendered("kubeletRoot: /data/kubelet\ndriversDir: /opt/drivers\nadmissionPolicy: {enabled: false}");
    let pod = one(&elsewhere, "DaemonSet")["spec"]["template"]["spec"].to_string();
    // A kubelet's directory of device plugins does not follow its root; the pod has it where the other directories are.
    let fixed = r#""path":"/var/lib/kubelet/device-plugins""#;
    assert!(pod.contains(fixed) && !pod.replace(fixed, "").contains("/var/lib/kubelet"), "{pod}");
    assert!(pod.contains(r#""mountPath":"/data/kubelet/device-plugins""#), "{pod}");
    assert!(pod.contains("--kubelet-root=/data/kubelet") && pod.contains("\"/opt/drivers\""), "{pod}");
    assert!(of_kind(&elsewhere, "ValidatingAdmissionPolicy").is_empty());
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
        ("terminationGracePeriodSeconds: 5", "terminationGracePeriodSeconds"),
        ("updateStrategy: {maxSurge: 0}", "maxSurge"),
        ("metrics: {podMonitor: {enabled: true}}", "metrics.enabled"),
    ] {
        let error = render(&helm, values).expect_err(values);
        assert!(error.contains(named), "{values}: {error}");
    }
}

#[test]
fn kustomize_builds_the_base() {
    let Some(kustomize) = tool("kustomize") else { return };
    let output = Command::new(kustomize).arg("build").arg(deploy().join("kustomize/base")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let built = comparable(parse(std::str::from_utf8(&output.stdout).unwrap()));
    assert_eq!(built, comparable(base()));
}
