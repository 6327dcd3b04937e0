//! Renders the kustomize base from the chart, and checks all of `deploy/`.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::machine::{self, Finding};
use crate::shell;
use crate::workspace::Workspace;

/// Release and namespace of the base.
const NAME: &str = "nodedock";
const SOURCE: &str = "# Source: nodedock/templates/";

pub(crate) fn run(workspace: &Workspace, check: bool) -> Result<()> {
    if !check {
        render_base(workspace)?;
    }
    shell::run(
        workspace
            .cargo()
            .args(["test", "--workspace", "--test", "deploy"]),
    )
}

/// Writes the objects of the chart with its defaults, one file for each template.
fn render_base(workspace: &Workspace) -> Result<()> {
    let helm = match machine::deploy_tool(workspace, "helm") {
        Ok(helm) => helm,
        Err(why) => bail!(
            "{why}: the kustomize base is rendered from the chart by Helm; --check looks at what is there"
        ),
    };
    let deploy = workspace.root.join("deploy");
    let mut command = Command::new(helm);
    command
        .args(["template", NAME])
        .arg(deploy.join("chart/nodedock"))
        .args(["--namespace", NAME]);
    command.args(["--kube-version", "1.36.0"]);
    let rendered = shell::read(&mut command)?;
    let base = deploy.join("kustomize/base");
    let mut files = vec!["namespace.yaml".to_owned()];
    let mut texts = std::collections::BTreeMap::<String, String>::new();
    for document in rendered
        .split("---\n")
        .filter(|document| document.contains(SOURCE))
    {
        let (name, text) = split(document)?;
        texts
            .entry(name)
            .or_default()
            .push_str(&format!("---\n{text}"));
    }
    for (name, text) in texts {
        write(&base.join(&name), &text)?;
        files.push(name);
    }
    let namespace = format!(
        "---\napiVersion: v1\nkind: Namespace\nmetadata:\n  name: {NAME}\n  labels:\n    # For hostPath volumes.\n    pod-security.kubernetes.io/enforce: privileged\n"
    );
    write(&base.join("namespace.yaml"), &namespace)?;
    let list: String = files.iter().map(|file| format!("  - {file}\n")).collect();
    let kustomization = format!(
        "# Rendered from deploy/chart/nodedock with its defaults: cargo xtask deploy\napiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources:\n{list}"
    );
    write(&base.join("kustomization.yaml"), &kustomization)
}

/// Returns the template of a document, and the document without Helm's own labels.
fn split(document: &str) -> Result<(String, String)> {
    let source = document
        .lines()
        .find_map(|line| line.strip_prefix(SOURCE))
        .context("a document without a source")?;
    let text = document
        .lines()
        .filter(|line| !is_of_helm(line) && !line.trim().is_empty());
    Ok((
        source.to_owned(),
        text.map(|line| format!("{line}\n")).collect(),
    ))
}

fn is_of_helm(line: &str) -> bool {
    line.starts_with(SOURCE)
        || line.trim_start().starts_with("helm.sh/chart:")
        || line.trim().starts_with("app.kubernetes.io/managed-by:")
}

fn write(file: &Path, text: &str) -> Result<()> {
    fs::write(file, text).with_context(|| format!("writing {}", file.display()))
}

/// Returns the missing tools of the deployment checks, each with the reason.
pub(crate) fn findings(workspace: &Workspace) -> [(String, Finding); 2] {
    ["helm", "kustomize"].map(|tool| {
        let finding = machine::deploy_tool(workspace, tool)
            .map_or_else(Finding::Missing, |_| Finding::Present);
        (format!("the deployment as {tool} makes it"), finding)
    })
}
