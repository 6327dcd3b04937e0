//! The admission policy of the deployment, by the library with which an API server judges it.

use std::path::Path;
use std::process::{Command, Stdio};

use nodedock_tests::machine::or_skip;
use serde_json::{Value, json};

use crate::programs;

const ACCOUNT: &str = "system:serviceaccount:nodedock:nodedock";

fn policy() -> Value {
    let file =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/kustomize/base/admissionpolicy.yaml");
    let text = std::fs::read_to_string(file).unwrap();
    let documents: Vec<Value> = serde_saphyr::from_multiple(&text).unwrap();
    documents
        .into_iter()
        .find(|object| object["kind"] == "ValidatingAdmissionPolicy")
        .unwrap()
}

fn request(
    operation: &str,
    user: &str,
    of_node: Option<&str>,
    before: Option<&str>,
    after: Option<&str>,
) -> Value {
    let slice = |node: &str| match node {
        "" => json!({"spec": {"allNodes": true, "driver": "gpu.example.com"}}),
        node => json!({"spec": {"nodeName": node, "driver": "gpu.example.com"}}),
    };
    let mut info = json!({"username": user, "groups": ["system:serviceaccounts"]});
    if let Some(node) = of_node {
        info["extra"] = json!({"authentication.kubernetes.io/node-name": [node]});
    }
    json!({
        "request": {"operation": operation, "userInfo": info},
        "object": after.map(slice),
        "oldObject": before.map(slice),
    })
}

#[test]
fn daemon_writes_slices_of_own_node() {
    let Some(program) = or_skip(
        "the admission policy, by the library of an API server",
        programs::go("policy"),
    ) else {
        return;
    };
    let cases = [
        (
            request("CREATE", ACCOUNT, Some("a"), None, Some("a")),
            "allow",
        ),
        (
            request("UPDATE", ACCOUNT, Some("a"), Some("a"), Some("a")),
            "allow",
        ),
        (
            request("DELETE", ACCOUNT, Some("a"), Some("a"), None),
            "allow",
        ),
        (
            request("CREATE", ACCOUNT, Some("a"), None, Some("b")),
            "deny: the slice is of node 'b', and this daemon runs on 'a'",
        ),
        (
            request("DELETE", ACCOUNT, Some("a"), Some("b"), None),
            "deny: the slice is of node 'b', and this daemon runs on 'a'",
        ),
        (
            request("CREATE", ACCOUNT, Some("a"), None, Some("")),
            "deny: the slice is of node '', and this daemon runs on 'a'",
        ),
        (
            request("CREATE", ACCOUNT, None, None, Some("a")),
            "deny: the token names no node; a daemon's token is bound to its pod",
        ),
        (
            request(
                "CREATE",
                "system:serviceaccount:other:nodedock",
                None,
                None,
                Some("a"),
            ),
            "no match",
        ),
        (
            request("DELETE", "system:node:a", None, Some("b"), None),
            "no match",
        ),
    ];
    let (requests, expected): (Vec<_>, Vec<_>) = cases.into_iter().unzip();
    let input = json!({"policy": policy(), "requests": requests}).to_string();
    let mut child = Command::new(program)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    let verdicts: Vec<String> = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(verdicts, expected);
}
