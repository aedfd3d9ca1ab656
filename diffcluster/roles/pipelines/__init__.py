"""Model families: unmodified diffusers pipelines, split among roles. The only importers of diffusers."""

from __future__ import annotations

from diffcluster.roles.pipelines.adapter import PipelineAdapter, load
from diffcluster.roles.pipelines.loading import Target

__all__ = ["PipelineAdapter", "Target", "load"]
