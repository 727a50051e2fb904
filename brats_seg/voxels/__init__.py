"""Arrays of voxels: boxes, orientation, resampling, components and surfaces."""
