"""python deploy/resolve_images.py SOURCE TARGET: copies a Ray cluster file and looks up the machine images it names.

An `ImageId` of the form `newest:NAME` becomes the id of Amazon's newest image of that name, in which * and ? are
wildcards. cluster.yaml runs this on the head before Ray starts. The lookup needs ec2:DescribeImages, which is part of
the role that Ray gives to the head; `resolve:ssm:` would need ssm:GetParameters, which is not.
"""

import sys
from pathlib import Path
from typing import Any

import yaml

PREFIX = "newest:"


def main() -> None:
    source, target = (Path(argument).expanduser() for argument in sys.argv[1:])
    config = yaml.safe_load(source.read_text(encoding="utf-8"))
    for name, node_type in (config.get("available_node_types") or {}).items():
        node_config = node_type.get("node_config") or {}
        image = node_config.get("ImageId", "")
        if image.startswith(PREFIX):
            node_config["ImageId"] = newest_image(image.removeprefix(PREFIX).strip(), config["provider"]["region"])
            print(f"image of node type {name}: {node_config['ImageId']}")
    target.touch(mode=0o600)
    target.write_text(yaml.safe_dump(config), encoding="utf-8")


def newest_image(name: str, region: str) -> str:
    """The id of the newest x86 image of this name that Amazon offers in the region."""
    import boto3  # needed on AWS only

    wanted = {"name": name, "state": "available", "architecture": "x86_64"}
    filters = [{"Name": key, "Values": [value]} for key, value in wanted.items()]
    pages = boto3.client("ec2", region).get_paginator("describe_images").paginate(Owners=["amazon"], Filters=filters)
    images: list[dict[str, Any]] = [image for page in pages for image in page["Images"]]
    if not images:
        sys.exit(f"error: Amazon has no image {name!r} in {region}; give an image id as ImageId in cluster.yaml")
    return str(max(images, key=lambda image: image["CreationDate"])["ImageId"])


if __name__ == "__main__":
    main()
